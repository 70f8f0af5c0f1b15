"""Natural micro-batches: a slot that becomes free takes what waits for one grader at once.

In: jobs, each one sample or one group. Out: their grades. No timer and no barrier: under light load a sample is called
alone the moment it arrives, under heavy load calls are full, and what waits is spread over all slots where that pays
(`deadlines.py`). A slot is anything with `call` and `ready`: a process here or on another machine.

A call that fails, in whatever way, is repeated one job at a time, so that only the guilty one is marked. Jobs under
suspicion hold at most half of the slots while others wait.
"""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.config import GraderConfig, grader_name
from raypipe.grading.deadlines import Pace
from raypipe.grading.results import Call, Grade, Reply, Sample, grades_of

MAX_LOST = 3
MAX_ERRORS = 1000


class Slot(Protocol):
    """One place where calls run: one at a time, or, for async graders, any number side by side."""

    name: str

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply: ...

    async def ready(self) -> None:
        """Returns when the slot can be called again after a reply with `ended`. Raises when it never will be."""


@dataclass
class Job:
    """What is called together or not at all: one sample, or the members of a group."""

    samples: list[Sample]
    done: asyncio.Future[list[Grade]]
    order: int = 0
    suspect: bool = False
    lost: int = 0

    def finish(self, grades: list[Grade]) -> None:
        if not self.done.done():  # whoever waited may have given up
            self.done.set_result(grades)


@dataclass
class Lane:
    """One grader's line, and what it has done so far."""

    index: int
    spec: GraderConfig
    is_async: bool
    pace: Pace
    waiting: deque[Job] = field(default_factory=deque)
    suspects: deque[Job] = field(default_factory=deque)
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    retries: int = 0

    def count(self, grades: Sequence[Grade]) -> None:
        for grade in grades:
            self.statuses[grade.status] += 1
            if grade.error and (grade.error in self.errors or len(self.errors) < MAX_ERRORS):
                self.errors[grade.error] += 1

    def stats(self) -> dict[str, Any]:
        return {
            "grader": grader_name(self.spec),
            "waiting": sum(len(job.samples) for job in (*self.waiting, *self.suspects)),
            "statuses": dict(self.statuses),
            "errors": self.errors.most_common(3),
            "seconds": self.seconds,
            "batches": dict(self.batches),
            "retries": self.retries,
        }


class BatchQueue:
    """Lines of jobs, one a grader, and the slots that they are called in."""

    def __init__(self, lanes: Sequence[Lane]):
        self.lanes = lanes
        self.slots: dict[Slot, set[int]] = {}  # with the graders that each slot's process has run
        self.free: deque[Slot] = deque()
        self.running = 0
        self.suspects_running = 0
        self.kills = 0  # processes that ended, by themselves or not
        self.closed = ""
        self.orders = itertools.count()
        self.pump_is_due = False
        self.tasks: set[asyncio.Task[None]] = set()

    def add(self, slot: Slot) -> None:
        self.slots[slot] = set()
        self.free.append(slot)
        self._pump()

    async def run(self, lane: Lane, samples: list[Sample], suspect: bool = False) -> list[Grade]:
        """The grades of samples that are called together or not at all."""
        job = Job(samples, asyncio.get_running_loop().create_future(), next(self.orders), suspect)
        (lane.suspects if suspect else lane.waiting).append(job)
        if not self.pump_is_due:
            # In this turn of the event loop the rest of a block may join the line. It costs no time.
            self.pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)
        return await job.done

    def close(self, reason: str) -> None:
        """Ends what waits, and what will come, with status `crash`."""
        self.closed = reason
        self.slots.clear()
        self.free.clear()
        self._pump()

    def _pump(self) -> None:
        """Gives work to every free slot."""
        self.pump_is_due = False
        if self.closed:
            for lane in self.lanes:
                for job in (*lane.waiting, *lane.suspects):
                    job.finish([Grade("crash", error=self.closed)] * len(job.samples))
                lane.waiting.clear()
                lane.suspects.clear()
        while self.free and (work := self._next_work()):
            task = asyncio.create_task(self._serve(self.free.popleft(), *work))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _next_work(self) -> tuple[Lane, list[Job]] | None:
        """A share of the line whose head has waited longest; or a suspect, while few run or nothing else waits."""
        waiting = min(
            (lane for lane in self.lanes if lane.waiting), key=lambda lane: lane.waiting[0].order, default=None
        )
        if waiting is None or self.suspects_running < max(1, len(self.slots) // 2):
            for lane in self.lanes:
                if lane.suspects:
                    return lane, [lane.suspects.popleft()]
        if waiting is None:
            return None
        line = waiting.waiting
        share = 1 if waiting.spec.scope == "group" else waiting.pace.share(len(line), len(self.slots))
        return waiting, [line.popleft() for _ in range(share)]

    async def _serve(self, slot: Slot, lane: Lane, jobs: list[Job]) -> None:
        """Runs a call in a slot that was free, and frees it again."""
        repeat = True
        while repeat and slot in self.slots:
            fresh = not self.slots[slot]
            reply, call = await self._call(slot, lane, jobs)
            # A crash may be the doing of what the process ran before: it counts in a fresh one only.
            repeat = reply.status == "crash" and reply.ended and len(jobs) == 1 and not fresh
            if not repeat:
                self._settle(lane, jobs, reply, call)
            if reply.ended:
                self._pump()
                await self._replace(slot, lane)
        if repeat:
            lane.suspects.append(jobs[0])
        if slot in self.slots:
            self.free.append(slot)
        self._pump()

    async def _call(self, slot: Slot, lane: Lane, jobs: list[Job]) -> tuple[Reply, Call]:
        samples = [sample for job in jobs for sample in job.samples]
        first = lane.index not in self.slots[slot]
        self.slots[slot].add(lane.index)
        limit_s = lane.pace.limit_s(len(samples), first) if len(jobs) > 1 else lane.spec.timeout_s * len(samples)
        self.running += len(samples)
        self.suspects_running += jobs[0].suspect
        start, clock = time.time(), time.monotonic()
        try:
            reply = await slot.call(lane.index, samples, limit_s)
        except Exception as error:
            reply = Reply("lost", error=f"{type(error).__name__}: {error}", ended=True)
        self.running -= len(samples)
        self.suspects_running -= jobs[0].suspect
        lane.pace.record(reply.status, len(samples), time.monotonic() - clock, first)
        lane.seconds += reply.seconds
        lane.batches[len(samples)] += 1
        return reply, Call(slot.name, start, reply.seconds, len(samples))

    async def _replace(self, slot: Slot, lane: Lane) -> None:
        """Waits until a slot whose process a lane ended has another; gives it up where it gets none."""
        self.kills += 1
        start = time.monotonic()
        try:
            await slot.ready()
        except Exception as error:
            self.slots.pop(slot, None)
            if not self.slots and not self.closed:
                self.close(f"no grader process can be started any more: {error}")
        else:
            lane.pace.replaced(time.monotonic() - start)
            if slot in self.slots:
                self.slots[slot].clear()

    def _settle(self, lane: Lane, jobs: list[Job], reply: Reply, call: Call) -> None:
        """Answers the jobs of a call, or puts them back in line."""
        if reply.status == "ok":
            grades = iter(grades_of(reply, call))
            for job in jobs:
                job.finish(list(itertools.islice(grades, len(job.samples))))
            return
        again: list[Job] = []
        for job in jobs:
            job.lost += reply.status == "lost"
            if reply.status == "lost" and job.lost < MAX_LOST:
                (lane.suspects if job.suspect else again).append(job)
            elif len(jobs) > 1:
                job.suspect = True
                lane.suspects.append(job)
            else:
                job.finish(grades_of(reply, call))
        lane.waiting.extendleft(reversed(again))
