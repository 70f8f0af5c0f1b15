"""The watchdog's parts: when a stall is told of, what is said of it, and the signals that end a run."""

import asyncio
import os
import signal
import threading
import time

import pytest

from raypipe.stopping import Signals
from raypipe.watchdog import Watch, describe, oldest, stacks


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stall_is_told_of_once_each_stall_s_and_progress_starts_anew():
    clock = Clock()
    watch = Watch(10.0, clock)
    assert watch.still("a") == 0 and not watch.is_due()
    clock.now += 9
    assert watch.still("a") == 9 and not watch.is_due()
    clock.now += 1
    assert watch.still("a") == 10 and watch.is_due() and not watch.is_due()
    clock.now += 10
    assert watch.still("a") == 20 and watch.is_due()
    assert watch.still("b") == 0 and not watch.is_due()


def test_the_oldest_samples_come_first_with_their_age():
    now = time.time()
    lines = oldest({"0/1/0": now - 5, "0/0/0": now - 50, "0/2/0": now}, count=2)
    assert lines == ["sample 0/0/0 since 50 s", "sample 0/1/0 since 5 s"]


def test_stacks_name_threads_and_tasks_and_where_they_are():
    held = threading.Event()

    def wait_for_a_grader() -> None:
        held.wait(30)

    async def wait_at_the_gate() -> list[str]:
        task = asyncio.create_task(asyncio.sleep(30), name="sample-7")
        await asyncio.sleep(0)
        found = stacks()
        task.cancel()
        return found

    thread = threading.Thread(target=wait_for_a_grader, name="waiter")
    thread.start()
    found = asyncio.run(wait_at_the_gate())
    held.set()
    thread.join()
    assert any(line.startswith("thread waiter: ") and "wait_for_a_grader" in line for line in found)
    assert any(line.startswith("task sample-7: ") and "sleep" in line for line in found)


def test_a_stall_names_every_actor_and_rank():
    now = time.time()
    pulse = {"phase": "wait for rows", "since": now - 90, "pid": 7, "node": "10.0.0.2", "at": now - 3, "stacks": ["x"]}
    assert describe({"engine-0": ["3 samples run"]}, ["grading"], {1: pulse}) == [
        "engine-0: 3 samples run",
        "grading: does not answer, and is started again",
        "learner-1: wait for rows since 90 s, process 7 on 10.0.0.2, heard 3 s ago",
        "learner-1: x",
    ]


def test_the_first_signal_is_noted_and_the_second_ends_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before
