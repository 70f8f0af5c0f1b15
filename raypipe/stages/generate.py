"""Generate: sends each sample of a block to a resident engine and waits until all of them are finished.

In: PROMPT_COLUMNS. Out: GENERATE_COLUMNS. The stage is thin: the engines and their gate outlive the plan, so this
process holds no weights, asks for no CPU, and can die and be run again (an engine knows each sample by its id). Samples
of one prompt go to the same engine, whose prefix cache then holds the prompt.

A block leaves when its last sample is finished, and then has the executor's queues before it. So a listener is told of
each sample at once, as a hint: the plan carries every sample in any case, and one told of twice, or never, is no fault.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import ray

from raypipe.rows import GENERATE_COLUMNS, PROMPT_COLUMNS, add_columns, check_columns, to_grade


class Generate:
    """Args:
    engines: names of the engine actors.
    plan: key of the plan; `abort(plan)` on an engine ends all that it asked for.
    sampling: sampling settings by the row's `purpose`, e.g. {"train": {"temperature": 1.0, ...}}.
    listener: name of an actor whose `hint` is called with finished samples (`rows.to_grade`).
    reserve: name of the actor that knows which prompts in reserve are needed; empty: there is no reserve.
    attempts: how many engines a sample may try when engines die under it.
    """

    def __init__(
        self, engines: list[str], plan: str, sampling: dict[str, dict[str, Any]], listener: str, reserve: str = "",
        attempts: int = 3,
    ):  # fmt: skip
        self.engines = {name: ray.get_actor(name) for name in engines}
        self.listener = ray.get_actor(listener)
        self.reserve = ray.get_actor(reserve) if reserve else None
        self.plan = plan
        self.sampling = sampling
        self.attempts = attempts
        self.in_flight: Counter[str] = Counter({name: 0 for name in engines})
        self.home: dict[int, str] = {}
        self.untold: list[dict[str, Any]] = []
        self.telling: asyncio.Task[None] | None = None

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, PROMPT_COLUMNS, "Generate")
        rows = table.select(list(PROMPT_COLUMNS)).to_pylist()
        return add_columns(table, await asyncio.gather(*map(self._finish, rows)), GENERATE_COLUMNS)

    async def _finish(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.reserve and row["reserve"] >= 0 and not await self.reserve.needed.remote(self.plan, row["reserve"]):
            return nothing("unused", "", "", time.time())
        generated = await self._generate(row)
        self.untold.append(to_grade(row | generated, self.plan))
        if self.telling is None or self.telling.done():
            self.telling = asyncio.create_task(self._tell())
        return generated

    async def _tell(self) -> None:
        """Gives hints in one call at a time: a sample that finishes alone is told of at once, many in one call."""
        while self.untold:
            samples, self.untold = self.untold, []
            with contextlib.suppress(ray.exceptions.RayError):
                await self.listener.hint.remote(samples)

    async def _generate(self, row: dict[str, Any]) -> dict[str, Any]:
        request = {
            "sample_id": row["sample_id"],
            "prompt_ids": row["prompt_ids"],
            "min_version": row["min_version"],
            "seed": row["seed"],
            "plan": self.plan,
            **self.sampling[row["purpose"]],
        }
        began = time.time()
        tried: list[str] = []
        while True:
            name = self._choose(row["group_id"], tried)
            tried.append(name)
            self.in_flight[name] += 1
            try:
                return await self.engines[name].generate.remote(request)
            except ray.exceptions.RayActorError as error:
                if len(tried) == self.attempts:
                    return nothing("failed", f"{name}: {type(error).__name__}: {error}", name, began)
            finally:
                self.in_flight[name] -= 1

    def _choose(self, group_id: int, tried: list[str]) -> str:
        """The engine of this prompt: where its earlier samples went, else the one with the fewest requests."""
        if self.home.get(group_id) in [None, *tried]:
            untried = [name for name in self.engines if name not in tried] or list(self.engines)
            self.home[group_id] = min(untried, key=lambda name: self.in_flight[name])
        return self.home[group_id]


def nothing(finish_reason: str, error: str, engine: str, start: float) -> dict[str, Any]:
    """GENERATE_COLUMNS of a sample without a response: `failed` ones are graded `error` and masked from the loss."""
    return {
        "response_text": "",
        "response_ids": [],
        "engine_logprobs": [],
        "weight_versions": [],
        "finish_reason": finish_reason,
        "generate_error": json.dumps(error)[1:-1][:2000],
        "engine": engine,
        "generate_start": start,
        "generate_end": time.time(),
    }
