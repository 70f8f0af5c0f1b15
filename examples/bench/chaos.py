"""Random faults under a real training run, and the ledger that shows whether a sample was lost or used twice.

Needs: the demo's model and data (examples/make_demo.py); about 6 GB of memory. The run is `configs/demo.yaml` made
small, with a critic, so that every kind of process takes part. Every few seconds one process, of a kind drawn by the
seed, gets kill -9, wherever the run may be at that moment. If it is the driver, the run is started again with
run.resume=auto. At the end SIGTERM stops the run. Then the ledger, from the run folder: every iteration has each of its
samples once, and none is missing between the first and the last.

With `--kinds raylet` the run is on a local cluster of three raylets, of which any but the head may be killed; another
takes its place. The driver may be connected to the one that dies: then it is started again as well.

    python examples/bench/chaos.py [--minutes 30] [--seed 0] [--kinds "learner rank,engine"] [--quick]
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 8, 4


class Kind(NamedTuple):
    """part: of the command line of such a process. again: what is started, and done, again."""

    part: str
    again: str


KINDS = {
    "grader child": Kind("raypipe.grading.child", "the process; its calls, one sample at a time"),
    "grader host": Kind("GraderHost", "the host and its processes; its calls"),
    "grade dispatcher": Kind("GradeDispatcher", "grading, hosts included; samples not yet collected"),
    "generate stage": Kind("MapBatches(Generate)", "the stage; nothing: engines know each sample by its id"),
    "grade stage": Kind("MapBatches(Grade)", "the stage; nothing: the dispatcher has the grades"),
    "score stage": Kind("MapBatches(Score)", "the stage; its samples are scored again"),
    "engine": Kind("VLLMEngine", "the engine with the newest weights; its samples"),
    "EngineCore": Kind("EngineCore", "the engine with the newest weights; its samples"),
    "scorer": Kind("ray::Scorer", "the scorer with the newest weights; its samples"),
    "weight store": Kind("WeightStore", "the store; nothing"),
    "learner rank": Kind("RayTrainWorker", "all ranks, from the last checkpoint; the iterations since"),
    "train controller": Kind("TrainController", "all ranks, from the last checkpoint; the iterations since"),
    "plan server": Kind("PlanServer", "the server and all ranks, from the last checkpoint; the iterations since"),
    "split coordinator": Kind("SplitCoordinator", "all ranks, from the last checkpoint; the iterations since"),
    "raylet": Kind(
        "", "what ran on the node, on others; all ranks, from the last checkpoint, if one of them was there"
    ),
    "driver": Kind("raypipe.train", "the run by run.resume=auto, from the last checkpoint; the iterations since"),
}


class Run:
    """A training run in a process of its own, started again after its driver was killed."""

    def __init__(self, folder: Path, overrides: list[str], cluster: Cluster | None):
        self.folder, self.overrides, self.cluster, self.starts = folder, overrides, cluster, 0
        self.log = folder / "log.txt"
        self.start()

    def start(self) -> None:
        command = [
            sys.executable, "-m", "raypipe.train", "--config", str(ROOT / "configs" / "demo.yaml"),
            f"run.dir={self.folder}", "run.name=chaos", "run.iterations=100000", "run.resume=auto",
            f"data.train_batch_size={PROMPTS}", f"rollout.n={SAMPLES}", "data.val_files=[]",
            "algorithm.adv_estimator=gae", "algorithm.kl_coef=0.001", "checkpoint.every=2", "train.mini_batches=1",
            "train.max_restarts=10", "log.samples=100000", "log.quiet=true", "log.loggers=[]",
            *self.overrides,
        ]  # fmt: skip
        self.starts += 1
        with self.log.open("a") as log:
            address = {"RAY_ADDRESS": self.cluster.address} if self.cluster else {}
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | address
            )

    def kill(self, kind: str, draw: random.Random) -> bool:
        """Kills one process of a kind; False if there is none."""
        if kind == "raylet":
            assert self.cluster
            self.cluster.remove_node(draw.choice(sorted(self.cluster.worker_nodes, key=str)), allow_graceful=False)
            self.cluster.add_node(num_cpus=4)
            return True
        found = self.processes(kind)
        with contextlib.suppress(psutil.Error):
            if found:
                draw.choice(found).kill()
        return bool(found)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Processes of a kind that belong to this run."""
        if kind == "driver":
            return [psutil.Process(self.process.pid)]
        found = []
        with contextlib.suppress(psutil.Error):
            # Of a cluster, the raylets and what they started are children of this process.
            root = psutil.Process(os.getpid() if self.cluster else self.process.pid)
            for process in root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if KINDS[kind].part in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def iterations(self) -> int:
        """Iterations whose metrics are written."""
        path = self.folder / "chaos" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def has_ended(self, seconds: float) -> bool:
        """Whether the driver ends by itself within so long."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit status, and the seconds that it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120), time.monotonic() - start


@contextlib.contextmanager
def cluster_for(kinds: list[str]) -> Iterator[Cluster | None]:
    """Three raylets on this machine, if some are to be killed."""
    if "raylet" not in kinds:
        yield None
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=4)
        yield cluster
    finally:
        cluster.shutdown()


def wait_for(run: Run, iterations: int, limit_s: float) -> bool:
    """Whether the run writes `iterations` iterations within the limit; a driver that ends by itself is an error."""
    deadline = time.monotonic() + limit_s
    while run.iterations() < iterations and time.monotonic() < deadline:
        if run.process.poll() is not None:
            raise RuntimeError(f"the run ended with status {run.process.returncode}:\n{run.log.read_text()[-4000:]}")
        time.sleep(0.2)
    return run.iterations() >= iterations


def ledger(folder: Path) -> dict[str, int]:
    """Counts over the run folder: iterations, samples, those lost, doubled and failed."""
    counts: Counter[str] = Counter(iterations=0, samples=0, lost=0, doubled=0, failed=0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [int(line["iteration"]) for line in lines]
    counts["missing_iterations"] = len(set(range(max(numbers) + 1)) - set(numbers))
    counts["doubled_iterations"] = len(numbers) - len(set(numbers))
    for number in numbers:
        text = (folder / "samples" / f"it_{number:06d}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        ids = Counter(row["sample_id"] for row in rows)
        wanted = {f"{number}/{group}/{member}" for group in range(PROMPTS) for member in range(SAMPLES)}
        counts["iterations"] += 1
        counts["samples"] += len(ids)
        counts["lost"] += len(wanted - set(ids))
        counts["doubled"] += sum(ids.values()) - len(ids)
        counts["failed"] += sum(row["status"] != "ok" for row in rows)
    return dict(counts)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that still name the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(folder) in command and process.pid != os.getpid():
                found.append(command)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument(
        "--kinds", default=",".join(kind for kind in KINDS if kind != "raylet"), help="of: " + ", ".join(KINDS)
    )
    parser.add_argument("--quick", action="store_true", help="3 minutes")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    draw, kinds = random.Random(options.seed), options.kinds.split(",")
    minutes = 3.0 if options.quick else options.minutes
    faults: Counter[str] = Counter()
    back: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, cluster_for(kinds) as cluster:
        run = Run(Path(name), options.overrides, cluster)
        if not wait_for(run, 1, 600):
            raise RuntimeError(f"the run did not start:\n{run.log.read_text()[-4000:]}")
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            time.sleep(draw.expovariate(1 / options.every))
            kind = draw.choice(kinds)
            before, start = run.iterations(), time.monotonic()
            if not run.kill(kind, draw):
                continue
            faults[kind] += 1
            print(f"{60 * minutes - (end - start):6.0f} s: killed a {kind} in iteration {before}", flush=True)
            if kind == "driver" or (kind == "raylet" and run.has_ended(5.0)):
                run.process.wait()
                run.start()
            if not wait_for(run, before + 1, 600):
                raise RuntimeError(f"after a {kind} was killed the run stood still:\n{run.log.read_text()[-6000:]}")
            back.setdefault(kind, []).append(time.monotonic() - start)
        status, seconds = run.stop()
        counts = ledger(Path(name) / "chaos")
        time.sleep(2.0)
        left = left_behind(Path(name))
    print("| killed | times | started and done again | next iteration written within |\n|---|---|---|---|")
    for kind in kinds:
        times = back.get(kind, [])
        if times:
            print(f"| {kind} | {len(times)} | {KINDS[kind].again} | {max(times):.0f} s, median {median(times):.0f} s |")
    print(f"stopped by SIGTERM with status {status} in {seconds:.1f} s; processes left: {len(left)}")
    print(
        json.dumps(
            {"bench": "chaos", "seed": options.seed, "minutes": minutes, "faults": sum(faults.values()),
             "by_kind": dict(faults), "driver_starts": run.starts, "exit_status": status, "stop_s": round(seconds, 1),
             "processes_left": len(left), **counts}
        )
    )  # fmt: skip
    if counts["lost"] or counts["doubled"] or counts["missing_iterations"] or counts["doubled_iterations"] or left:
        sys.exit(1)


if __name__ == "__main__":
    main()
