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
from raypipe.grading.processes import GraderProcesses, Sample
from raypipe.grading.queue import GradeQueue, grader_names
from raypipe.grading.results import Reply


class LocalSlot:
    """One process of this machine, as the queue sees it."""

    def __init__(self, processes: GraderProcesses, index: int, name: str):
        self.processes, self.index, self.name = processes, index, name

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        return await self.processes.call(self.index, grader, samples, limit_s)

    async def ready(self) -> None:
        await self.processes.ready(self.index)


class LocalLoop:
    """The process of this machine that runs async graders, as the queue sees it."""

    def __init__(self, processes: GraderProcesses, name: str):
        self.processes, self.name = processes, name

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        return await self.processes.call_in_loop(grader, samples, limit_s)

    async def ready(self) -> None:
        return


class GradingPool:
    def __init__(
        self, graders: Sequence[GraderConfig | dict[str, Any]], processes: int = 2, memory_mb: int = 4096,
        async_concurrency: int = 64, async_rate: float = 0.0, retries: int = 4, start_limit_s: float = 600.0,
        namespaces: bool = True,
    ):  # fmt: skip
        """
        Args:
            graders: as in the configuration's `grade.graders`.
            processes: calls that run at the same time.
            memory_mb: memory of one process and all its descendants, MiB.
            async_concurrency, async_rate, retries: limits of async graders, as in the configuration.
            start_limit_s: seconds that building all graders may take.
            namespaces: isolate by PID namespaces where the kernel permits it (`keeper.py`).
        """
        self.graders = [grader if isinstance(grader, GraderConfig) else GraderConfig(**grader) for grader in graders]
        names = grader_names(self.graders)
        self.processes = GraderProcesses(self.graders, names, processes, memory_mb, start_limit_s, namespaces)
        self.limits = (async_concurrency, async_rate, retries)
        self.queue: GradeQueue | None = None

    async def start(self) -> None:
        """Builds every grader. Raises GraderStartError (a ValueError) with its name and traceback if one cannot be."""
        await self.processes.start()
        self.queue = GradeQueue(self.graders, self.processes.is_async, *self.limits)
        for index in range(self.processes.count):
            self.queue.add_slot(LocalSlot(self.processes, index, f"process-{index}"))
        if any(self.processes.is_async):
            self.queue.add_loop(LocalLoop(self.processes, "loop"))

    async def grade(self, sample: Sample) -> dict[str, Any]:
        """The GRADE_COLUMNS of one sample; see `GradeQueue.grade`."""
        assert self.queue is not None, "start() comes first"
        return await self.queue.grade(sample)

    def forget(self, iteration: int) -> None:
        assert self.queue is not None
        self.queue.forget(iteration)

    def stats(self) -> dict[str, Any]:
        assert self.queue is not None
        return self.queue.stats()

    async def close(self) -> None:
        """Kills every process; samples that still wait end with status `crash`."""
        if self.queue:
            await self.queue.close()
        await self.processes.close()
