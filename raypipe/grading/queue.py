"""The queue between samples and grader processes: natural micro-batches, deadlines, repeats one by one, groups, limits.

In: `grade(sample)`, one coroutine a sample, from anywhere. Out: its GRADE_COLUMNS. Slots (anything with `call` and
`ready`) are local processes or processes of other machines; the queue does not know which.

A slot that becomes free takes what waits for one grader, up to `max_batch` and to its fair share, at once. No timer and
no barrier: under light load a sample is called alone the moment it arrives, under heavy load calls are full.

A call that fails, in whatever way, is repeated one sample at a time, so that only the guilty one is marked. Samples under
suspicion hold at most half of the slots while others wait.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.config import GraderConfig, grader_name
from raypipe.grading.deadlines import Pace
from raypipe.grading.results import Grade, Reply, combine, grade_of, ungraded

Sample = dict[str, Any]
MAX_LOST = 3
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


class Slot(Protocol):
    """One place where one call runs at a time."""

    name: str

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply: ...

    async def ready(self) -> None:
        """Returns when the slot can be called again after a reply with `ended`. Raises when it never will be."""


@dataclass
class Job:
    """What is called together or not at all: one sample, or the members of a group."""

    samples: list[Sample]
    done: "asyncio.Future[list[Grade]]"
    alone: bool = False
    crashes: int = 0
    lost: int = 0


@dataclass
class Lane:
    """One grader's line."""

    index: int
    name: str
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


class Group:
    """The members of a prompt that have arrived (None: generation failed), and the grades of the one call they share."""

    def __init__(self) -> None:
        self.members: dict[str, Sample | None] = {}
        self.grades: asyncio.Future[dict[str, Grade]] = asyncio.get_running_loop().create_future()


class RequestLimits:
    """Most calls of async graders at a time, and most started per second, over the whole run."""

    def __init__(self, concurrency: int, rate: float):
        self.free = asyncio.Semaphore(concurrency)
        self.interval_s = 1.0 / rate if rate > 0 else 0.0
        self.next_start = 0.0

    async def __aenter__(self) -> None:
        await self.free.acquire()
        try:
            now = time.monotonic()
            start, self.next_start = max(now, self.next_start), max(now, self.next_start) + self.interval_s
            if start > now:
                await asyncio.sleep(start - now)
        except BaseException:
            self.free.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.free.release()


class GradeQueue:
    def __init__(
        self, graders: Sequence[GraderConfig], is_async: Sequence[bool], async_concurrency: int = 64,
        async_rate: float = 0.0, retries: int = 4,
    ):  # fmt: skip
        self.lanes = [
            Lane(i, name, spec, is_async[i], Pace(spec.timeout_s, spec.max_batch if spec.batch else 1))
            for i, (name, spec) in enumerate(zip(grader_names(graders), graders, strict=True))
        ]
        self.limits = RequestLimits(async_concurrency, async_rate)
        self.retries = retries
        self.slots: dict[Slot, set[int]] = {}  # and the graders that each slot's process has run
        self.free: deque[Slot] = deque()
        self.loops: Counter[Slot] = Counter()  # slots for async graders, and the calls in each
        self.groups: dict[tuple[Any, ...], Group] = {}
        self.suspects_running = 0
        self.running = 0
        self.kills = 0
        self.failure: str | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    def add_slot(self, slot: Slot) -> None:
        self.slots[slot] = set()
        self.free.append(slot)
        self._pump()

    def add_loop(self, slot: Slot) -> None:
        """A slot that runs any number of calls of async graders at the same time."""
        self.loops[slot] = 0

    def remove(self, slot: Slot) -> None:
        self.slots.pop(slot, None)
        self.loops.pop(slot, None)
        if slot in self.free:
            self.free.remove(slot)

    async def grade(self, sample: Sample) -> dict[str, Any]:
        """Grades one sample by every grader of its data source.

        Args:
            sample: `sample_id`, `data_source`, `prompt_text`, `response_text`, `ground_truth` and `extra_info` (JSON);
                for group graders also `iteration`, `group_id` and `group_size`; where generation may fail also
                `finish_reason` and `generate_error`.

        Returns:
            its GRADE_COLUMNS. A response whose generation failed is called by no grader: status `error`.
        """
        lanes = [
            lane for lane in self.lanes if not lane.spec.data_sources or sample["data_source"] in lane.spec.data_sources
        ]
        if not lanes:
            return ungraded(f"no grader has the data source {sample['data_source']!r}")
        if sample.get("finish_reason") == "failed":
            for lane in lanes:
                if lane.spec.scope == "group":
                    self._join(lane, sample, failed=True)
            return ungraded(f"generation failed: {sample.get('generate_error')}")
        opinions = [
            self._in_group(lane, sample) if lane.spec.scope == "group" else self._submit(lane, [sample])
            for lane in lanes
        ]
        grades = await asyncio.gather(*opinions) if len(opinions) > 1 else [await opinions[0]]
        return combine([(lane.name, lane.spec) for lane in lanes], [grade for (grade,) in grades], time.time())

    async def _in_group(self, lane: Lane, sample: Sample) -> list[Grade]:
        grades = await asyncio.shield(self._join(lane, sample, failed=False).grades)
        return [grades[sample["sample_id"]]]

    def _join(self, lane: Lane, sample: Sample, failed: bool) -> Group:
        """Adds a member to its group; the last one submits the group for all."""
        sample_id = sample["sample_id"]
        key = (lane.index, sample["iteration"], sample["group_id"], sample_id.rpartition("/")[0])
        group = self.groups.setdefault(key, Group())
        group.members[sample_id] = None if failed else sample
        if len(group.members) >= sample["group_size"]:
            del self.groups[key]
            self._keep(self._grade_group(lane, group))
        return group

    async def _grade_group(self, lane: Lane, group: Group) -> None:
        members = sorted(sample_id for sample_id, sample in group.members.items() if sample)
        samples = [sample for sample_id in members if (sample := group.members[sample_id])]
        grades = await self._submit(lane, samples) if samples else []
        if not group.grades.done():
            group.grades.set_result(dict(zip(members, grades, strict=True)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _submit(self, lane: Lane, samples: list[Sample]) -> list[Grade]:
        job = Job(samples, asyncio.get_running_loop().create_future())
        if lane.is_async and self.loops:
            grades = await self._run_async(lane, job)
        else:
            grades = await self._enqueue(lane, job)
        for grade in grades:
            lane.statuses[grade.status] += 1
            if grade.error and (grade.error in lane.errors or len(lane.errors) < 1000):
                lane.errors[grade.error] += 1
        return grades

    def _enqueue(self, lane: Lane, job: Job) -> "asyncio.Future[list[Grade]]":
        (lane.suspects if job.alone else lane.waiting).append(job)
        self._pump()
        return job.done

    def _pump(self) -> None:
        """Gives work to every free slot."""
        while self.failure is not None:
            lane = next((lane for lane in self.lanes if lane.waiting or lane.suspects), None)
            if lane is None:
                return
            job = (lane.suspects or lane.waiting).popleft()
            job.done.set_result([Grade("crash", error=self.failure, start=time.time()) for _ in job.samples])
        while self.free and (work := self._next_work()):
            lane, jobs = work
            self._keep(self._run(self.free.popleft(), lane, jobs))

    def _next_work(self) -> tuple[Lane, list[Job]] | None:
        """The longest line's share; suspects first, while they hold less than half of the slots or nothing else waits."""
        lane = max(self.lanes, key=lambda lane: len(lane.waiting), default=None)
        suspected = next((lane for lane in self.lanes if lane.suspects), None)
        if lane is None:
            return None
        if suspected and (not lane.waiting or self.suspects_running < max(1, len(self.slots) // 2)):
            return suspected, [suspected.suspects.popleft()]
        if not lane.waiting:
            return None
        if lane.spec.scope == "group":
            return lane, [lane.waiting.popleft()]
        share = -(-len(lane.waiting) // len(self.slots))
        return lane, [lane.waiting.popleft() for _ in range(min(share, lane.pace.largest(), len(lane.waiting)))]

    async def _run(self, slot: Slot, lane: Lane, jobs: list[Job]) -> None:
        samples = [sample for job in jobs for sample in job.samples]
        ran = self.slots.get(slot, set())
        fresh, first = not ran, lane.index not in ran
        ran.add(lane.index)
        suspect = jobs[0].alone
        limit_s = lane.spec.timeout_s * len(samples) if len(jobs) == 1 else lane.pace.limit_s(len(samples), first)
        self.running += len(samples)
        self.suspects_running += suspect
        start, clock = time.time(), time.monotonic()
        try:
            reply = await slot.call(lane.index, samples, limit_s)
        finally:
            self.running -= len(samples)
            self.suspects_running -= suspect
        if reply.status != "lost":
            lane.pace.record(len(samples), time.monotonic() - clock, first)
            lane.seconds += reply.seconds
            lane.batches[len(samples)] += 1
        self._settle(lane, jobs, reply, slot.name, start, fresh)
        if reply.ended:
            self.kills += reply.status != "lost"
            ran.clear()
            try:
                await slot.ready()
            except Exception as error:
                self._give_up(slot, str(error))
                return
        if slot in self.slots:
            self.free.append(slot)
        self._pump()

    def _give_up(self, slot: Slot, error: str) -> None:
        self.remove(slot)
        if not self.slots:
            self.failure = f"no grader process can be started any more: {error}"
        self._pump()

    def _settle(self, lane: Lane, jobs: list[Job], reply: Reply, slot: str, start: float, fresh: bool) -> None:
        """Answers the jobs of a call, or puts them back."""
        if reply.status == "ok":
            entries = iter(reply.entries)
            batch = len(reply.entries)
            for job in jobs:
                grades = [grade_of(next(entries), reply, batch, slot, start) for _ in job.samples]
                if not job.done.done():
                    job.done.set_result(grades)
            return
        for job in jobs:
            job.crashes += reply.status == "crash" and len(jobs) == 1
            job.lost += reply.status == "lost"
            again = reply.status == "lost" and job.lost < MAX_LOST
            # A crash in a process that ran other samples before may be their doing: it counts in a fresh one, or twice.
            if again or len(jobs) > 1 or (reply.status == "crash" and not fresh and job.crashes < 2):
                job.alone = job.alone or not again
                (lane.suspects.append if job.alone else lane.waiting.appendleft)(job)
            elif not job.done.done():
                status = "crash" if reply.status == "lost" else reply.status
                grade = Grade(status, None, {}, reply.error, reply.seconds, len(job.samples), slot, start)
                job.done.set_result([grade] * len(job.samples))

    async def _run_async(self, lane: Lane, job: Job) -> list[Grade]:
        """One request of an async grader: within the run's limits, repeated with backoff after connection errors only."""
        backoff_s = FIRST_BACKOFF_S
        for attempt in range(self.retries + 1):
            async with self.limits:
                loop = min(self.loops, key=self.loops.__getitem__)
                self.loops[loop] += 1
                self.running += len(job.samples)
                start = time.time()
                try:
                    reply = await loop.call(lane.index, job.samples, lane.spec.timeout_s * len(job.samples))
                finally:
                    self.running -= len(job.samples)
                    if loop in self.loops:
                        self.loops[loop] -= 1
                if reply.ended or reply.status == "lost":
                    # The whole loop went down, with the calls beside this one. Each is repeated alone, in a slot.
                    job.alone = True
                    return await self._enqueue(lane, job)
            lane.seconds += reply.seconds
            lane.batches[len(job.samples)] += 1
            if not (reply.retry and attempt < self.retries):
                break
            lane.retries += 1
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        if reply.status == "ok":
            return [grade_of(entry, reply, len(job.samples), loop.name, start) for entry in reply.entries]
        grade = Grade(reply.status, None, {}, reply.error, reply.seconds, len(job.samples), loop.name, start)
        return [grade] * len(job.samples)

    def forget(self, iteration: int) -> None:
        """Ends the wait of incomplete groups of an iteration whose plan is gone."""
        for key in [key for key in self.groups if key[1] == iteration]:
            group = self.groups.pop(key)
            error = f"{len(group.members)} members of the group arrived before its iteration ended"
            if not group.grades.done():
                group.grades.set_result({m: Grade("error", error=error) for m in group.members})

    def stats(self) -> dict[str, Any]:
        """Counts since the start, by grader; `errors` are its commonest, with their counts."""
        return {
            "queued": sum(len(job.samples) for lane in self.lanes for job in (*lane.waiting, *lane.suspects)),
            "running": self.running,
            "kills": self.kills,
            "slots": len(self.slots),
            "graders": {
                lane.name: {
                    "statuses": dict(lane.statuses),
                    "errors": lane.errors.most_common(3),
                    "seconds": lane.seconds,
                    "batches": dict(lane.batches),
                    "retries": lane.retries,
                }
                for lane in self.lanes
            },
        }

    async def close(self) -> None:
        self.failure = "grading was closed"
        for slot in [*self.slots, *self.loops]:
            self.remove(slot)
        self._pump()


def grader_names(graders: Sequence[GraderConfig]) -> list[str]:
    """The graders' names: as configured, else the part of `path` after the colon. Raises ValueError if two are equal."""
    names = [grader_name(grader) for grader in graders]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"grade.graders: two graders are named {name!r}; give each its own `name`")
    return names
