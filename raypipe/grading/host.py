"""The grader processes of one node: a resident Ray actor that the dispatcher calls.

In: one call of one grader for one slot. Out: its `Reply`. Holds no queue, so that a host that dies takes no waiting
sample with it; Ray starts it again, and it builds its graders again at the first call.
"""

import asyncio

from raypipe.config import GraderConfig
from raypipe.grading.processes import GraderProcesses
from raypipe.grading.results import Reply, Sample
from raypipe.watchdog import stacks

START_LIMIT_S = 600.0


class GraderHost:
    def __init__(self, graders: list[GraderConfig], processes: int, memory_mb: int):
        self.processes = GraderProcesses(graders, processes, memory_mb, START_LIMIT_S, namespaces=True)
        self.starting: asyncio.Task[None] | None = None

    async def start(self) -> list[bool]:
        """Builds the graders, once. Raises GraderStartError. Returns which of them are async."""
        if self.starting is None or (self.starting.done() and self.starting.exception()):
            self.starting = asyncio.create_task(self.processes.start())
        await asyncio.shield(self.starting)
        return self.processes.is_async

    async def call(self, slot: int | None, grader: int, samples: list[Sample], limit_s: float) -> Reply:
        """One call in a slot, or, without one, of an async grader beside others."""
        await self.start()
        if slot is None:
            return await self.processes.call_in_loop(grader, samples, limit_s)
        return await self.processes.call(slot, grader, samples, limit_s)

    async def ready(self, slot: int | None) -> None:
        """Returns when the slot has a process. Raises GraderStartError if it gets none any more."""
        await self.start()
        await self.processes.ready(slot)

    async def doing(self) -> list[str]:
        """What a stalled run shows of this host."""
        return stacks()

    async def close(self) -> None:
        await self.processes.close()
