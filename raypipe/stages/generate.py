"""Generate: sends each sample of a block to a resident engine and waits until all of them are finished.

In: PROMPT_COLUMNS. Out: GENERATE_COLUMNS. The stage is thin: the engines and their gate outlive the plan, so this
process holds no weights, asks for no CPU, and can die and be run again (an engine knows each sample by its id). Samples
of one prompt go to the same engine, whose prefix cache then holds the prompt.

Where the plan has a reserve (`reserve.py`), its prompts wait here until they are needed, and once enough groups are
complete, what still runs for training is aborted at the engines.

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

from raypipe.rows import GENERATE_COLUMNS, PLACE, PROMPT_COLUMNS, SAVED, TOO_LONG, add_columns, check_columns, to_grade


class Generate:
    """Args:
    engines: names of the engine actors.
    plan: key of the plan; `abort(plan)` on an engine ends all that it asked for.
    sampling: sampling settings by the row's `purpose`, e.g. {"train": {"temperature": 1.0, ...}}.
    listener: name of an actor whose `hint` is called with finished samples (`rows.to_grade`); empty: there is none.
    reserve: name of the actor that knows which prompts are needed; empty: there is no reserve.
    attempts: how many engines a sample may try when engines die under it.
    """

    def __init__(
        self, engines: list[str], plan: str, sampling: dict[str, dict[str, Any]], listener: str, reserve: str = "",
        attempts: int = 3,
    ):  # fmt: skip
        self.engines = {name: ray.get_actor(name) for name in engines}
        self.listener = ray.get_actor(listener) if listener else None
        self.reserve: Any = ray.get_actor(reserve) if reserve else None
        self.plan = plan
        self.sampling = sampling
        self.attempts = attempts
        self.in_flight: Counter[str] = Counter({name: 0 for name in engines})
        self.home: dict[int, str] = {}
        self.training: dict[str, set[str]] = {name: set() for name in engines}  # samples that may turn out surplus
        self.enough = False
        self.watching: asyncio.Task[None] | None = None
        self.untold: list[dict[str, Any]] = []
        self.telling: asyncio.Task[None] | None = None

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, PROMPT_COLUMNS, "Generate")
        own = [name for name in (SAVED[0], PLACE) if name in table.column_names]
        rows = table.select([*PROMPT_COLUMNS, *own]).to_pylist()
        table = table.drop_columns(own)
        if self.reserve and self.watching is None:
            self.watching = asyncio.create_task(self._abort_surplus())
        return add_columns(table, await asyncio.gather(*map(self._finish, rows)), GENERATE_COLUMNS)

    async def _finish(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.reserve and row["reserve"] >= 0 and not await self.reserve.needed.remote(self.plan, row["reserve"]):
            return nothing("unused", "", "", time.time())
        generated = await self._generate(row)
        if self.enough and row["purpose"] == "train":  # its group was not complete when enough others were
            return generated | {"finish_reason": "surplus"}
        if self.listener:
            self.untold.append(to_grade(row | generated, self.plan))
            if self.telling is None or self.telling.done():
                self.telling = asyncio.create_task(self._tell())
        return generated

    async def _abort_surplus(self) -> None:
        """Waits until there are enough groups, and ends what engines still make for others."""
        await self.reserve.enough.remote(self.plan)
        self.enough = True
        for name, samples in self.training.items():
            self.engines[name].abort.remote(self.plan, sorted(samples))

    async def _tell(self) -> None:
        """Gives hints in one call at a time: a sample that finishes alone is told of at once, many in one call."""
        while self.untold:
            samples, self.untold = self.untold, []
            assert self.listener is not None
            with contextlib.suppress(ray.exceptions.RayError):
                await self.listener.hint.remote(samples)

    async def _generate(self, row: dict[str, Any]) -> dict[str, Any]:
        if SAVED[0] in row:
            return nothing("", "", "saved", time.time()) | row[SAVED[0]]
        request = {
            "sample_id": row["sample_id"],
            "prompt_ids": row["prompt_ids"],
            "min_version": row["min_version"],
            "place": row.get(PLACE, 0),
            "seed": row["seed"],
            "plan": self.plan,
            **self.sampling[row["purpose"]],
        }
        began = time.time()
        tried: list[str] = []
        slow = False
        while True:
            name = self._choose(row["group_id"], tried)
            if self.enough and row["purpose"] == "train":
                return nothing("failed", "not needed any more", name, began)
            tried.append(name)
            self.in_flight[name] += 1
            if row["purpose"] == "train":
                self.training[name].add(row["sample_id"])
            try:
                generated = await self.engines[name].generate.remote(request)
                if slow or not generated["generate_error"].startswith(TOO_LONG):
                    return generated
                slow = True  # once more, in another engine if there is one
            except ray.exceptions.RayActorError as error:
                if len(tried) == self.attempts:
                    return nothing("failed", f"{name}: {type(error).__name__}: {error}", name, began)
            finally:
                self.in_flight[name] -= 1
                self.training[name].discard(row["sample_id"])

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
