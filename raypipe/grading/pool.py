"""Grading without Ray: the queue over processes of this machine. `raypipe.grade` and the tests use it.

In: samples, one coroutine each. Out: their GRADE_COLUMNS.

    pool = GradingPool([GraderConfig(path="graders.math:MathGrader")], processes=4)
    await pool.start()
    columns = await pool.grade(sample)
    await pool.close()
"""

from collections.abc import Sequence
from typing import Any

from raypipe.config import GraderConfig
from raypipe.config_checks import check_names
from raypipe.grading.processes import GraderProcesses
from raypipe.grading.queue import GradeQueue
from raypipe.grading.results import Reply, Sample


class LocalSlot:
    """One process of this machine as the queue sees it; without an index, the one that runs async graders."""

    def __init__(self, processes: GraderProcesses, index: int | None, name: str):
        self.processes, self.index, self.name = processes, index, name

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        if self.index is None:
            return await self.processes.call_in_loop(grader, samples, limit_s)
        return await self.processes.call(self.index, grader, samples, limit_s)

    async def ready(self) -> None:
        await self.processes.ready(self.index)


class GradingPool:
    """Args:
    graders: as in the configuration's `grade.graders`.
    processes: calls that run at the same time.
    memory_mb: memory of one process with all its descendants, MiB.
    async_concurrency, async_rate, retries: limits of async graders, as in the configuration.
    start_limit_s: seconds that building one grader may take.
    namespaces: isolate by PID namespaces where the kernel permits it (`keeper.py`).
    """

    def __init__(
        self, graders: Sequence[GraderConfig | dict[str, Any]], processes: int = 2, memory_mb: int = 4096,
        async_concurrency: int = 64, async_rate: float = 0.0, retries: int = 4, start_limit_s: float = 600.0,
        namespaces: bool = True,
    ):  # fmt: skip
        self.graders = [grader if isinstance(grader, GraderConfig) else GraderConfig(**grader) for grader in graders]
        check_names(self.graders)
        self.processes = GraderProcesses(self.graders, processes, memory_mb, start_limit_s, namespaces)
        self.request_limits = (async_concurrency, async_rate, retries)

    async def start(self) -> None:
        """Builds every grader. Raises GraderStartError (a ValueError) with its name and traceback if one cannot be."""
        await self.processes.start()
        self.queue = GradeQueue(self.graders, self.processes.is_async, *self.request_limits)
        for index in range(self.processes.count):
            self.queue.add_slot(LocalSlot(self.processes, index, f"process-{index}"))
        if any(self.processes.is_async):
            self.queue.add_loop(LocalSlot(self.processes, None, "loop"))

    async def grade(self, sample: Sample) -> dict[str, Any]:
        """The GRADE_COLUMNS of one sample; see `GradeQueue.grade`."""
        return await self.queue.grade(sample)

    def stats(self) -> dict[str, Any]:
        """Counts since the start; see `GradeQueue.stats`."""
        return self.queue.stats()

    async def close(self) -> None:
        """Ends every process; samples that still wait get the status `crash`."""
        self.queue.close()
        await self.processes.close()
