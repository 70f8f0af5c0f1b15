"""An engine without a model: responses of scripted lengths, at a scripted pace, behind the real gate.

It stands where a vLLM engine stands, so that the plan, the gate, the graders and the learner's feed can be tested and
timed without one. Everything follows from the request's seed, so a repeated request gives the same response.
"""

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.engines.gate import Gate
from raypipe.live import Live, engine_metrics


@dataclass(frozen=True)
class LongTail:
    """A log-normal draw: half of the values lie below `median`, few are near `most`, at which they are cut."""

    median: float
    sigma: float
    most: float

    @property
    def mean(self) -> float:
        """Without the cut."""
        return self.median * math.exp(self.sigma**2 / 2)

    def __call__(self, draw: random.Random) -> float:
        return min(self.most, draw.lognormvariate(math.log(self.median), self.sigma))


class ScriptedEngine:
    """Args:
    name: the engine's name, as in the rows.
    seconds: (shortest, longest) time of a response, drawn uniformly from the request's seed.
    tokens: (fewest, most) tokens of a response, or a long-tailed number of them.
    seconds_per_token: what each token of a response adds to its time.
    vocab: token ids are drawn from range(1, vocab).
    concurrency: requests that run at the same time; the others wait.
    """

    def __init__(
        self,
        name: str,
        seconds: tuple[float, float] = (0.0, 0.0),
        tokens: tuple[int, int] | LongTail = (1, 8),
        seconds_per_token: float = 0.0,
        vocab: int = 64,
        concurrency: int = 256,
    ):
        self.name, self.seconds, self.tokens, self.vocab = name, seconds, tokens, vocab
        self.seconds_per_token = seconds_per_token
        self.gate = Gate()
        self.slots = asyncio.Semaphore(concurrency)
        self.running: dict[tuple[str, str], asyncio.Task] = {}  # by plan and sample
        self.served = self.made = 0
        self.reporting: asyncio.Task[None] | None = None

    async def ready(self) -> dict[str, Any]:
        if self.reporting is None:
            self.reporting = asyncio.create_task(Live().report(self._stats, engine_metrics))
        return {"name": self.name, "device": "scripted", "version": self.gate.version}

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        key = (request["plan"], request["sample_id"])
        task = self.running[key] = asyncio.ensure_future(self._generate(request))
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return self._columns("", [], "failed", "aborted", time.time())
        finally:
            self.running.pop(key, None)

    async def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        await self.gate.wait(request["min_version"], request.get("place", 0))
        async with self.slots:
            start = time.time()
            draw = random.Random(request["seed"])
            length = draw.randint(*self.tokens) if isinstance(self.tokens, tuple) else math.ceil(self.tokens(draw))
            finish = "stop" if length <= request["max_tokens"] else "length"
            ids = [draw.randrange(1, self.vocab) for _ in range(min(length, request["max_tokens"]))]
            await asyncio.sleep(draw.uniform(*self.seconds) + self.seconds_per_token * len(ids))
            self.served += 1
            self.made += len(ids)
            return self._columns(" ".join(map(str, ids)), ids, finish, "", start)

    def _columns(self, text: str, ids: list[int], finish: str, error: str, start: float) -> dict[str, Any]:
        return {
            "response_text": text,
            "response_ids": ids,
            "engine_logprobs": [-1.0] * len(ids),
            "weight_versions": [self.gate.version] * len(ids),
            "finish_reason": finish,
            "generate_error": error,
            "engine": self.name,
            "generate_start": start,
            "generate_end": time.time(),
        }

    async def doing(self) -> list[str]:
        return [f"weights {self.gate.version}, {self.gate.waiting} wait at the gate"]

    async def open_gate(self, version: int) -> None:
        """New weights are there: requests that asked for `version` or less may run."""
        self.gate.open(version)

    async def abort(self, plan: str, samples: Sequence[str] | None = None) -> int:
        wanted = None if samples is None else set(samples)
        return self._cancel(
            [t for (of, id), t in self.running.items() if of == plan and (wanted is None or id in wanted)]
        )

    async def abort_all(self) -> int:
        return self._cancel(list(self.running.values()))

    def _cancel(self, tasks: list[asyncio.Task]) -> int:
        for task in tasks:
            task.cancel()
        return len(tasks)

    async def stats(self) -> dict[str, Any]:
        return self._stats()

    def _stats(self) -> dict[str, Any]:
        return {
            "served": self.served,
            "generated_tokens": self.made,
            "waiting": self.gate.waiting,
            "version": self.gate.version,
            "pid": os.getpid(),
        }

    async def close(self) -> None:
        pass
