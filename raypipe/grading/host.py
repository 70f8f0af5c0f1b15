"""The grader processes of one node: a resident Ray actor that the dispatcher calls.

In: one call of one grader for one slot. Out: its `Reply`. Holds no queue, so that a host that dies takes no waiting
sample with it; Ray starts it again, and it builds its graders again at the first call.
"""

import asyncio
from typing import Any

from raypipe.config import GraderConfig
from raypipe.grading.processes import GraderProcesses, Sample
from raypipe.grading.queue import grader_names
from raypipe.grading.results import Reply


class GraderHost:
    def __init__(self, graders: list[GraderConfig], processes: int, memory_mb: int):
        self.processes = GraderProcesses(graders, grader_names(graders), processes, memory_mb)
        self.starting: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Builds the graders once. Raises GraderStartError. Returns which of them are async."""
        if self.starting is None or (self.starting.done() and self.starting.exception()):
            self.starting = asyncio.create_task(self.processes.start())
        await asyncio.shield(self.starting)
        return {"is_async": self.processes.is_async, "why_no_template": self.processes.why_no_template}

    async def call(self, slot: int, grader: int, samples: list[Sample], limit_s: float) -> Reply:
        await self.start()
        return await self.processes.call(slot, grader, samples, limit_s)

    async def call_in_loop(self, grader: int, samples: list[Sample], limit_s: float) -> Reply:
        await self.start()
        return await self.processes.call_in_loop(grader, samples, limit_s)

    async def ready(self, slot: int) -> None:
        await self.start()
        await self.processes.ready(slot)

    async def close(self) -> None:
        await self.processes.close()
