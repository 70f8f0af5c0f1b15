"""The grader processes of one machine: as many as calls may run at a time, and their replacement.

In: calls of a grader with samples, each in a slot. Out: a `Reply` each. A process that ended is replaced in the
background, by a copy of a template that has the graders loaded where that is safe (`child.py`), else by a new start.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from raypipe.config import GraderConfig
from raypipe.grading import wire
from raypipe.grading.child import BEAT_S
from raypipe.grading.keeper import Limits
from raypipe.grading.process import GraderProcess, GraderStartError
from raypipe.grading.results import Reply, Sample

# That a grader process with its descendants may be: far below a fork bomb, and above what the sandboxes of
# `graders.code` hold at worst, which run one for each CPU.
PROCESSES = 500 + 70 * (os.cpu_count() or 1)
MAX_HARD_PROCESSES = 30_000  # Linux numbers processes up to 32768 by default
STARTS = 5
ASYNC_GRACE_S = 1.0
MAX_SILENCE_S = 2.0


class GraderProcesses:
    """The grader processes of one machine: `count` slots for one call each, and one event loop for async graders."""

    def __init__(
        self, graders: Sequence[GraderConfig], count: int, memory_mb: int, start_limit_s: float, namespaces: bool
    ):
        self.graders, self.count, self.start_limit_s = graders, count, start_limit_s
        self.limits = Limits(memory_mb, PROCESSES, 2 * PROCESSES, namespaces)
        self.living: set[GraderProcess] = set()
        self.template: asyncio.Task[GraderProcess] | None = None
        self.slots: list[asyncio.Task[GraderProcess]] = []
        self.loop: asyncio.Task[GraderProcess] | None = None
        self.watch: asyncio.Task[None] | None = None
        self.is_async: list[bool] = []
        self.not_forkable = ""
        self.closed = False

    async def start(self) -> None:
        """Builds the graders. Raises GraderStartError, with no process left."""
        try:
            first = asyncio.create_task(self._build())
            await first
            if self.not_forkable:
                self.slots = [first]
            else:
                self.template = first
            self.slots += [asyncio.create_task(self._new()) for _ in range(self.count - len(self.slots))]
            if any(self.is_async):
                self.loop = asyncio.create_task(self._new_loop())
            await asyncio.gather(*self._tasks())
        except BaseException:
            await self.close()
            raise

    def _tasks(self) -> list[asyncio.Task[GraderProcess]]:
        return [*self.slots, *filter(None, [self.loop, self.template])]

    async def _serving(self, process: GraderProcess) -> GraderProcess:
        self.living = {other for other in self.living if not other.ended.is_set()} | {process}
        await process.serving()
        return process

    async def _build(self) -> GraderProcess:
        """A new process with every grader loaded; it may hold copies of itself where that is safe."""
        limits = replace(self.limits, hard_processes=min(2 * PROCESSES * (self.count + 2), MAX_HARD_PROCESSES))
        try:
            process = await self._serving(GraderProcess.start(limits, self.count))
        except (EOFError, OSError) as error:
            raise GraderStartError(f"no grader process can be started ({sys.executable}): {error!r}") from None
        answers = [await process.load(grader, self.start_limit_s) for grader in self.graders]
        self.is_async = [answer.get("is_async") is True for answer in answers]
        self.not_forkable = str(answers[-1].get("not_forkable", "it did not say")) if answers else ""
        if not self.not_forkable:
            process.allow(self.count + 2)
        return process

    async def _new(self) -> GraderProcess:
        for attempt in range(STARTS):
            try:
                if self.template is None:
                    return await self._build()
                if self.template.done() and (self.template.exception() or self.template.result().ended.is_set()):
                    self.template = asyncio.create_task(self._build())
                template = await asyncio.shield(self.template)
                return await self._serving(template.spawn(self.limits))
            except (GraderStartError, EOFError, OSError) as error:  # TimeoutError is an OSError
                if attempt == STARTS - 1:
                    raise GraderStartError(str(error) or "grader processes end as soon as they start") from None
                await asyncio.sleep(attempt)  # the machine may be short of something for a moment
        raise AssertionError

    async def _new_loop(self) -> GraderProcess:
        process = await self._new()
        process.writer.write(wire.encode({"op": "serve"}))
        process.last_beat = time.monotonic()
        self.watch = asyncio.create_task(self._watch_loop(process))
        return process

    async def _watch_loop(self, process: GraderProcess) -> None:
        """Ends an event loop that one call holds up, and all other calls with it."""
        while not process.ended.is_set():
            await asyncio.sleep(BEAT_S)
            if time.monotonic() - process.last_beat > MAX_SILENCE_S:
                process.kill(f"was stopped: a call blocked its event loop for {MAX_SILENCE_S:g} s")

    async def call(self, slot: int, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        """One call in a slot, which must be free."""
        reply = await (await self._of(self.slots[slot])).call(grader, samples, limit_s)
        if reply.ended and not self.closed:
            self.slots[slot] = asyncio.create_task(self._new())
        return reply

    async def call_in_loop(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        """One call of an async grader, beside others in one process. One that blocks the process ends all of them."""
        assert self.loop is not None
        loop = self.loop
        reply = await (await self._of(loop)).call(grader, samples, limit_s, ASYNC_GRACE_S)
        if reply.ended and self.loop is loop and not self.closed:
            self.loop = asyncio.create_task(self._new_loop())
        return reply

    async def ready(self, slot: int | None) -> None:
        """Returns when the slot (None: the loop) has a process. Raises GraderStartError if it gets none any more."""
        task = self.loop if slot is None else self.slots[slot]
        if task:
            await self._of(task)

    async def _of(self, task: asyncio.Task[GraderProcess]) -> GraderProcess:
        if self.closed:
            raise GraderStartError("grading was closed")
        await asyncio.wait([task])  # which leaves it alone when this wait is cancelled
        if task.cancelled():
            raise GraderStartError("grading was closed")
        return task.result()

    async def close(self) -> None:
        """Ends every process."""
        self.closed = True
        for task in (*self._tasks(), self.watch):
            if task:
                task.cancel()
        await asyncio.gather(*self._tasks(), return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self.living))
