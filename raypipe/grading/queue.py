"""The front of grading: finds the graders of a sample, waits for its group where one asks for it, adds up the scores.

In: `grade(sample)`, one coroutine a sample, from anywhere. Out: its GRADE_COLUMNS.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from raypipe.config import GraderConfig, grader_name
from raypipe.config_checks import check_names
from raypipe.grading.batches import BatchQueue, Lane, Slot
from raypipe.grading.deadlines import Pace
from raypipe.grading.requests import RequestQueue
from raypipe.grading.results import Grade, Sample, combine, not_graded

# What graders see of a sample.
SEEN = (
    "data_source", "prompt", "prompt_text", "response_text", "response_ids", "response_length", "ground_truth",
    "extra_info",
)  # fmt: skip


class Group:
    """The members of a prompt that have arrived (None: generation failed), and the grades of the call they share."""

    def __init__(self, size: int, members: Mapping[str, Sample | None]):
        self.size, self.members = size, dict(members)
        self.grades: asyncio.Future[dict[str, Grade]] = asyncio.get_running_loop().create_future()

    @property
    def complete(self) -> bool:
        return len(self.members) >= self.size


class GradeQueue:
    """Args:
    graders: as configured; a slot's `call` names them by their index here.
    is_async: which of them are async.
    concurrency, rate, retries: limits of async graders (`RequestQueue`).
    """

    def __init__(
        self, graders: Sequence[GraderConfig], is_async: Sequence[bool], concurrency: int, rate: float, retries: int
    ):
        check_names(graders)
        self.lanes = [
            Lane(index, spec, is_async[index], Pace(spec.timeout_s, spec.max_batch if spec.batch else 1))
            for index, spec in enumerate(graders)
        ]
        self.batches = BatchQueue(self.lanes)
        self.requests = RequestQueue(concurrency, rate, retries, self.batches)
        self.groups: dict[tuple[Any, ...], Group] = {}
        self.group_tasks: set[asyncio.Task[None]] = set()
        self.received = self.graded = 0

    def add_slot(self, slot: Slot) -> None:
        """A slot that runs one call at a time."""
        self.batches.add(slot)

    def add_loop(self, loop: Slot) -> None:
        """A slot that runs calls of async graders side by side."""
        self.requests.add(loop)

    async def grade(self, sample: Sample) -> dict[str, Any]:
        """Grades one sample by every grader of its data source.

        Args:
            sample: `sample_id` and the columns SEEN (`prompt`, `ground_truth` and `extra_info` as JSON); for group
                graders also `plan`, `iteration`, `purpose`, `group_id` and `group_size`; where generation may fail also
                `finish_reason` and `generate_error`.

        Returns:
            its GRADE_COLUMNS. A sample whose generation failed is called by no grader: status `error`.

        Raises:
            ValueError: the sample lacks a column.
        """
        if missing := [name for name in SEEN if name not in sample]:
            raise ValueError(f"grading reads the columns {list(SEEN)}, of which the sample lacks {missing}")
        self.received += 1
        try:
            return await self._grade(sample)
        finally:
            self.graded += 1

    async def _grade(self, sample: Sample) -> dict[str, Any]:
        lanes = [lane for lane in self.lanes if matches(lane.spec, sample["data_source"])]
        if not lanes:
            return not_graded(f"no grader has the data source {sample['data_source']!r} in its data_sources")
        if sample.get("finish_reason") == "failed":
            for lane in lanes:
                if lane.spec.scope == "group":
                    self._join(lane, sample, failed=True)
            return not_graded(f"generation failed: {sample.get('generate_error')}")
        opinions = [
            self._in_group(lane, sample) if lane.spec.scope == "group" else self._alone(lane, sample) for lane in lanes
        ]
        grades = await asyncio.gather(*opinions) if len(opinions) > 1 else [await opinions[0]]
        return combine([lane.spec for lane in lanes], grades)

    async def _alone(self, lane: Lane, sample: Sample) -> Grade:
        return (await self._run(lane, [sample]))[0]

    async def _in_group(self, lane: Lane, sample: Sample) -> Grade:
        grades = await asyncio.shield(self._join(lane, sample, failed=False).grades)
        # Absent where the sample was generated anew meanwhile, and failed.
        return grades.get(sample["sample_id"], Grade("error", error="another generation took its place in the group"))

    def _join(self, lane: Lane, sample: Sample, failed: bool) -> Group:
        """Adds a member to its group; the last one has the group called, and so has one that is generated anew later.

        Groups are kept for the latter until `forget`.
        """
        key = (sample.get("plan", ""), sample["iteration"], sample.get("purpose"), sample["group_id"], lane.index)
        group = self.groups.get(key)
        if group is None or group.complete:
            group = self.groups[key] = Group(sample["group_size"], group.members if group else {})
        group.members[sample["sample_id"]] = None if failed else sample
        if group.complete:
            self._keep(self._grade_group(lane, group))
        return group

    async def _grade_group(self, lane: Lane, group: Group) -> None:
        samples = [sample for _, sample in sorted(group.members.items()) if sample]
        grades = await self._run(lane, samples) if samples else []
        group.grades.set_result({sample["sample_id"]: grade for sample, grade in zip(samples, grades, strict=True)})

    async def _run(self, lane: Lane, samples: list[Sample]) -> list[Grade]:
        grades = await (self.requests if lane.is_async else self.batches).run(lane, samples)
        lane.count(grades)
        return grades

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.group_tasks.add(task)
        task.add_done_callback(self.group_tasks.discard)

    def forget(self, plan: str) -> None:
        """Lets go of a plan's groups, and ends the wait of those whose missing members will not come."""
        for key in [key for key in self.groups if key[0] == plan]:
            group = self.groups.pop(key)
            if not group.complete:
                error = f"only {len(group.members)} members of its group arrived"
                group.grades.set_result({sample_id: Grade("error", error=error) for sample_id in group.members})

    def stats(self) -> dict[str, Any]:
        """Counts since the start: samples received and graded, kills, and by grader its statuses and commonest errors.

        `queued` and `running` count a sample once for each of its graders.
        """
        lanes = {grader_name(lane.spec): lane.stats() for lane in self.lanes}
        return {
            "slots": len(self.batches.slots),
            "received": self.received,
            "graded": self.graded,
            "queued": sum(lane["waiting"] for lane in lanes.values()),
            "running": self.batches.running,
            "kills": self.batches.kills,
            "graders": lanes,
        }

    def close(self) -> None:
        """Ends what waits with status `crash`."""
        self.batches.close("grading was closed")


def matches(grader: GraderConfig, data_source: str) -> bool:
    return not grader.data_sources or data_source in grader.data_sources


def check_data_sources(graders: Sequence[GraderConfig], data_sources: Iterable[str]) -> None:
    """Raises ValueError that names the data sources which no grader grades."""
    missing = sorted({source for source in data_sources if not any(matches(grader, source) for grader in graders)})
    if missing:
        raise ValueError(
            f"grade.graders: no grader has the data sources {missing}, which are in the data; add them to the "
            "data_sources of a grader, or leave those empty, so that it grades all"
        )
