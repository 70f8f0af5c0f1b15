"""A run under faults, end to end on real parts: what dies is started again, no sample is lost or used twice, and
SIGTERM leaves a checkpoint and no process."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
from engine_processes import engine_cores
from test_train import ROOT, Workplace

PROMPTS, SAMPLES = 8, 4
OVERRIDES = (
    "run.iterations=1000", "data.val_files=[]", f"data.train_batch_size={PROMPTS}", f"rollout.n={SAMPLES}",
    "rollout.max_response_length=8", "checkpoint.every=1", "log.samples=100000", "train.lr=1e-3",
)  # fmt: skip


class Faults:
    """A run in a process of its own."""

    def __init__(self, workplace: Workplace, name: str, *overrides: str):
        self.folder = workplace.folder / "runs" / name
        self.log = workplace.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "raypipe.train", "--config", str(workplace.folder / "config.yaml"),
            f"run.name={name}", *OVERRIDES, *overrides,
        ]  # fmt: skip
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))

    def lines(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, iterations: int) -> None:
        deadline = time.monotonic() + 240
        while len(self.lines()) < iterations:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def send(self, part: str, number: signal.Signals) -> None:
        (engine_cores(self.find("VLLMEngine"))[0] if part == "EngineCore" else self.find(part)).send_signal(number)

    def find(self, part_of_command: str) -> psutil.Process:
        """A process of the run; what dies beside it while we look is no fault."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if part_of_command in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"the run has no process {part_of_command}")

    def stop(self, number: signal.Signals) -> float:
        """Seconds from the signal to the end of the process."""
        start = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - start


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("faults"))


def check_ledger(run: Faults) -> None:
    """Every iteration is there once, with each of its samples once."""
    lines = run.lines()
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    for number in range(len(lines)):
        text = (run.folder / "samples" / f"it_{number:06d}.jsonl").read_text()
        ids = Counter(json.loads(line)["sample_id"] for line in text.splitlines())
        assert ids == Counter(f"{number}/{group}/{member}" for group in range(PROMPTS) for member in range(SAMPLES))


def left_running(workplace: Workplace) -> str:
    return subprocess.run(["pgrep", "-fa", str(workplace.folder)], capture_output=True, text=True).stdout


def test_a_run_survives_its_parts_and_stops_in_good_order(workplace):
    run = Faults(workplace, "faults")
    try:
        run.wait_for(1)
        for parts in (("RayTrainWorker",), ("EngineCore", "PlanServer"), ("GradeDispatcher",)):
            before = len(run.lines())
            for part in parts:
                run.send(part, signal.SIGKILL)
            run.wait_for(before + 2)
        assert run.stop(signal.SIGTERM) < 30
    finally:
        run.process.kill()
    log = run.log.read_text()
    assert run.process.returncode == 128 + signal.SIGTERM, log[-4000:]
    assert "the learner was lost and goes on from iteration" in log
    check_ledger(run)
    done = len(run.lines())
    assert f"the state after {done} iterations is saved; go on with run.resume=auto" in log
    assert left_running(workplace) == ""
    # It goes on as if nothing had been; what does not answer is started again; a second Ctrl-C waits for nothing.
    before = run.lines()
    run = Faults(
        workplace, "faults", "run.resume=auto", "watchdog.stall_s=12", "watchdog.fail_s=60", "watchdog.sample_s=30"
    )
    try:
        run.wait_for(done + 1)
        assert run.lines()[:done] == before
        # The engines, which start from the first model, got the checkpoint's weights before the first sample.
        assert run.lines()[done]["mismatch/max"] < 1e-4
        run.send("GradeDispatcher", signal.SIGSTOP)
        run.wait_for(len(run.lines()) + 2)
        log = run.log.read_text()
        assert "nothing has moved for" in log and "grading: does not answer, and is started again" in log
        assert "engine-0: weights" in log and "learner-0: " in log, "who does what"
        run.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while "SIGINT: the run saves its state and ends" not in run.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run.stop(signal.SIGINT) < 15
    finally:
        run.process.kill()
    assert run.process.returncode == 128 + signal.SIGINT
    check_ledger(run)
    assert left_running(workplace) == ""


def test_a_run_that_stands_still_ends_with_its_state(workplace):
    """Of saved responses, which need no engine."""
    rows = [{"prompt": f"p{i}", "response": "abc", "answer": "a"} for i in range(PROMPTS) for _ in range(SAMPLES)]
    rollouts = workplace.folder / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Faults(
        workplace, "stalled", "data.train_files=[]", f"data.rollouts=[{rollouts}]", "algorithm.old_logprobs=learner",
        "watchdog.stall_s=12", "watchdog.fail_s=35", "watchdog.sample_s=30", "watchdog.stop_s=5",
    )  # fmt: skip
    try:
        run.wait_for(1)
        deadline = time.monotonic() + 60
        while not (run.folder / "checkpoints" / f"step_{len(run.lines())}").exists():
            assert time.monotonic() < deadline, run.log.read_text()[-4000:]
            time.sleep(0.02)
        run.send("RayTrainWorker", signal.SIGSTOP)
        run.process.wait(180)
    finally:
        run.process.kill()
    log = run.log.read_text()
    assert run.process.returncode == 1, log[-4000:]
    assert "error: nothing has moved for" in log and "over watchdog.fail_s=35" in log
    assert "learner-0: " in log, "who does what"
    found = re.search(r"the state after (\d+) iterations is saved; the learner did not end in watchdog.stop_s", log)
    # The last checkpoint may have been on its way.
    assert found and len(run.lines()) - 1 <= int(found[1]) <= len(run.lines()), log[-4000:]
    assert (run.folder / "checkpoints" / f"step_{found[1]}" / "progress.json").exists()
    check_ledger(run)
    assert left_running(workplace) == ""
