"""Calls of async graders: side by side in event loops, within limits that hold for the whole run.

In: one job a call (a sample, or a group), since a call is one request to some server and that is what the limits count.
Out: its grades. A connection error is repeated with backoff; any other failure is the sample's.
"""

import asyncio
import time
from collections import Counter

from raypipe.grading.batches import BatchQueue, Lane, Slot
from raypipe.grading.results import Call, Grade, Reply, Sample, grades_of

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


class RequestQueue:
    """Args:
    concurrency: most calls at a time.
    rate: most calls started per second, retries included; 0: no limit.
    retries: how often a call is repeated after connection errors.
    batches: where a call is repeated alone when the process it ran in went down with all its calls.
    """

    def __init__(self, concurrency: int, rate: float, retries: int, batches: BatchQueue):
        self.permits = asyncio.Semaphore(concurrency)
        self.interval_s = 1.0 / rate if rate > 0 else 0.0
        self.next_start = 0.0
        self.retries = retries
        self.batches = batches
        self.loops: Counter[Slot] = Counter()  # with the calls in each
        self.restarts: dict[Slot, asyncio.Task[None]] = {}

    def add(self, loop: Slot) -> None:
        self.loops[loop] = 0

    async def run(self, lane: Lane, samples: list[Sample]) -> list[Grade]:
        for attempt in range(self.retries + 1):
            async with self.permits:
                await self._pace()
                if not self.loops:
                    return await self.batches.run(lane, samples, suspect=True)
                loop = min(self.loops, key=self.loops.__getitem__)
                start = time.time()
                reply = await self._call(loop, lane, samples)
                if reply.ended:
                    # Which of the calls in that process was guilty is unknown: each is repeated alone, in a slot.
                    await self._pace()
                    return await self.batches.run(lane, samples, suspect=True)
            if not reply.retry or attempt == self.retries:
                break
            lane.retries += 1
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2**attempt, MAX_BACKOFF_S))
        return grades_of(reply, Call(loop.name, start, reply.seconds, len(samples)))

    async def _pace(self) -> None:
        """Waits for this call's turn; turns are evenly spaced."""
        now = time.monotonic()
        turn = max(now, self.next_start)
        self.next_start = turn + self.interval_s
        if turn > now:
            await asyncio.sleep(turn - now)

    async def _call(self, loop: Slot, lane: Lane, samples: list[Sample]) -> Reply:
        self.loops[loop] += 1
        self.batches.running += len(samples)
        try:
            reply = await loop.call(lane.index, samples, lane.spec.timeout_s * len(samples))
        except Exception as error:
            reply = Reply("lost", error=f"{type(error).__name__}: {error}", ended=True)
        self.batches.running -= len(samples)
        lane.seconds += reply.seconds
        lane.batches[len(samples)] += 1
        if loop in self.loops:
            self.loops[loop] -= 1
            if reply.ended:
                del self.loops[loop]
                self.batches.kills += reply.status != "lost"
                self.restarts[loop] = asyncio.create_task(self._restart(loop))
        return reply

    async def _restart(self, loop: Slot) -> None:
        """Takes a loop back once its process is replaced. One that never is stays out: slots do its work."""
        await loop.ready()
        self.add(loop)
        del self.restarts[loop]
