"""Whatever a grader does costs at most the guilty sample, and leaves no process behind."""

import asyncio
import json
import math
import os
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from raypipe.grading import processes
from raypipe.grading.namespaces import permitted_namespaces
from raypipe.grading.pool import GradingPool

FAULTY = f"{Path(__file__).parent / 'faulty_graders.py'}"
TIMEOUT_S = 0.5
MEMORY_MB = 250


def sample(response, index=0, **columns):
    return {
        "sample_id": f"0/{index}/0", "plan": "plan-0", "iteration": 0, "group_id": index, "group_size": 1,
        "data_source": "test", "prompt": '"?"', "prompt_text": "<?>", "response_text": response,
        "response_ids": [7] * 7, "response_length": 7, "ground_truth": "1", "extra_info": "{}", **columns,
    }  # fmt: skip


def marked(mark):
    """Ids of the processes that were started with the environment variable MARK, or forked from one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={mark}\0".encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


class Bench:
    """A pool of two processes and the event loop that it lives in, for a whole module."""

    def __init__(self, mark, *graders, **options):
        self.mark = mark
        self.loop = asyncio.new_event_loop()
        self.pool = GradingPool(list(graders), processes=2, **options)
        self.loop.run_until_complete(self.pool.start())

    def grade(self, *responses, **columns):
        return self.run(self.gather(*responses, **columns))

    async def gather(self, *responses, **columns):
        rows = [sample(text, index, **columns) for index, text in enumerate(responses)]
        return await asyncio.gather(*map(self.pool.grade, rows))

    def run(self, work):
        return self.loop.run_until_complete(work)

    def close(self):
        self.run(self.pool.close())
        self.loop.close()


@pytest.fixture
def mark(monkeypatch):
    value = uuid.uuid4().hex
    monkeypatch.setenv("MARK", value)
    yield value
    until(lambda: not marked(value))


@pytest.fixture(scope="module", params=[True, False], ids=["namespace", "sweep"])
def bench(request):
    if request.param and not permitted_namespaces():
        pytest.skip("this kernel permits no PID namespace")
    # A machine at its limits must not make a time-out of a crash.
    limits = {"hasty": TIMEOUT_S, "patient": 60.0}
    graders = [
        {"path": f"{FAULTY}:Faulty", "name": name, "data_sources": [name], "timeout_s": timeout_s}
        for name, timeout_s in limits.items()
    ]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        mark = uuid.uuid4().hex
        patch.setenv("MARK", mark)
        patch.setattr(processes, "PROCESSES", 60)
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        bench = Bench(mark, *graders, memory_mb=MEMORY_MB, namespaces=request.param)
        for name in limits:
            bench.grade(*["fine"] * 8, data_source=name)
        bench.at_rest = len(marked(mark))
        yield bench
        bench.close()
        assert marked(mark) == set()
        assert os.listdir(folder) == []


FAULTS = {
    "hang": ("timeout", "took more than 0.5 s"),
    "spin": ("timeout", "took more than 0.5 s"),
    "spin_without_switching_threads": ("timeout", "took more than 0.5 s"),
    "block_signals": ("timeout", "took more than 0.5 s"),
    "stop_itself": ("timeout", "took more than 0.5 s"),
    "print_forever": ("timeout", "took more than 0.5 s"),
    "hang_with_children": ("timeout", "took more than 0.5 s"),
    "hang_with_daemons": ("timeout", "took more than 0.5 s"),
    "segfault": ("crash", "killed by SIGSEGV; last output: File"),
    "exit_0": ("crash", "exited with code 0"),
    "exit_3": ("crash", "exited with code 3; last output: giving up"),
    "abort": ("crash", "SIGABRT"),
    "kill_itself": ("crash", "SIGKILL"),
    "terminate_itself": ("crash", "SIGTERM"),
    "overflow_the_stack": ("crash", "SIGSEGV"),
    "eat_memory": ("crash", "more than 250 MiB of memory"),
    "eat_memory_in_children": ("crash", "more than 250 MiB of memory"),
    "fork_bomb": ("crash", "more than 60 processes"),
    "hop": ("crash", "exited with code 1"),
    "crash_with_daemons": ("crash", "exited with code 1"),
    "crash_with_loud_daemon": ("crash", "exited with code 1"),
    "close_everything": ("crash", "its process"),
    "write_everywhere": ("crash", "its process was stopped: it sent"),
    "answer_unasked": ("crash", "an answer to no question"),
    "answer_nonsense": ("crash", "its process was stopped: it sent"),
    "answer_falsely": ("crash", "its process was stopped: it sent"),
    "announce_a_giant": ("crash", "a frame of 4026531840 bytes"),
    "break_json": ("crash", "its process exited"),
    "raise_value_error": ("error", "ValueError: cannot parse 7"),
    "raise_unprintable": ("error", "Unprintable"),
    "raise_memory_error": ("error", "MemoryError"),
    "recurse": ("error", "RecursionError"),
    "raise_system_exit": ("crash", "SystemExit: enough"),
    "raise_keyboard_interrupt": ("crash", "KeyboardInterrupt"),
    "raise_base_exception": ("crash", "Judgement: too slow"),
    "return_none_at_all": ("error", "returned float, not a list of 1 scores"),
    "return_text": ("error", "returned str, not a list of 1 scores"),
    "return_too_few": ("error", "returned 0 scores for 1 samples"),
    "return_a_liar": ("ok", ""),
    "return_generator": ("error", "returned generator, not a list of 1 scores"),
    "print_much": ("ok", ""),
    "leave_file": ("ok", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_guilty_sample_is_marked_and_no_process_stays(bench, fault):
    status, text = FAULTS[fault]
    data_source = "hasty" if status == "timeout" else "patient"
    graded = bench.grade(*["fine"] * 4, fault, *["fine"] * 4, data_source=data_source)
    guilty = graded.pop(4)
    assert [(row["score"], row["grade_status"]) for row in graded] == [(1.0, "ok")] * 8
    assert guilty["grade_status"] == status
    (detail,) = json.loads(guilty["grades"])
    assert text in detail["error"]
    assert math.isnan(guilty["score"]) == (status != "ok")
    until(lambda: len(marked(bench.mark)) == bench.at_rest)
