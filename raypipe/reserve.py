"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) inside one streaming plan: prompts in reserve.

A prompt whose samples all have one score has no group advantage. The plan holds `rollout.reserve_prompts` further
prompts, whose requests wait here before they go to an engine. In: the scores of each sample as it is graded. Out: for
each waiting request whether it is needed: one prompt of the reserve for each group without signal. Those that are not
needed leave the plan unused, so that it ends, bounded by the reserve.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray

from raypipe.config import Config

# Calls that may wait in the actor, past any plan.
MAX_CONCURRENCY = 100_000


class Graded(NamedTuple):
    """A graded training sample; `score` is None if it failed."""

    sample_id: str
    group_id: int
    group_size: int
    score: float | None


class Supply:
    """What one plan needs of its reserve. Pure bookkeeping.

    Args:
        wanted: prompts with signal that the iteration is to have, and that it begins with.
        reserve: prompts in reserve, numbered from 0.
    """

    def __init__(self, wanted: int, reserve: int):
        self.wanted, self.reserve = wanted, reserve
        self.released = 0  # prompts of the reserve that are needed: those numbered below this
        self.useful = self.lost = 0
        self.open: dict[int, dict[str, float | None]] = {}
        self.closed: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """No further prompt will be released."""
        return self.useful >= self.wanted or self.useful + self.lost == self.wanted + self.released

    def add(self, samples: Iterable[Graded]) -> None:
        """Takes in graded samples; one that is told of twice counts once."""
        for sample in samples:
            if sample.group_id in self.closed:
                continue
            scores = self.open.setdefault(sample.group_id, {})
            scores[sample.sample_id] = sample.score
            if len(scores) == sample.group_size:
                self.closed.add(sample.group_id)
                self._count({score for score in self.open.pop(sample.group_id).values() if score is not None})

    def _count(self, scores: set[float]) -> None:
        if len(scores) > 1:
            self.useful += 1
            return
        self.lost += 1
        if self.released < self.reserve:
            self.released += 1


class Reserve:
    """An async Ray actor, one a run: the supplies of its plans.

    Args: as of `Supply`.
    """

    def __init__(self, wanted: int, reserve: int):
        self.wanted, self.reserve = wanted, reserve
        self.supplies: dict[str, Supply] = {}
        self.changed = asyncio.Condition()
        self.forgotten: set[str] = set()

    async def open(self, plan: str) -> None:
        """The plan begins."""
        self.supplies[plan] = Supply(self.wanted, self.reserve)

    def _supply(self, plan: str) -> Supply:
        """Raises RuntimeError, which ends the plan, when what was known of it died with the actor."""
        if plan not in self.supplies:
            raise RuntimeError(f"the reserve has lost count of plan {plan}")
        return self.supplies[plan]

    async def needed(self, plan: str, number: int) -> bool:
        """Whether prompt `number` of the plan's reserve is needed; waits until that is known."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: plan in self.forgotten
                or number < self._supply(plan).released
                or self._supply(plan).is_settled
            )  # fmt: skip
        return plan not in self.forgotten and number < self._supply(plan).released

    async def graded(self, plan: str, samples: list[Graded]) -> None:
        """Training samples of the plan that have been graded."""
        if plan not in self.forgotten:
            async with self.changed:
                self._supply(plan).add(samples)
                self.changed.notify_all()

    async def forget(self, plan: str) -> None:
        """The plan is over: what still waits for it is not needed."""
        async with self.changed:
            self.forgotten.add(plan)
            self.supplies.pop(plan, None)
            self.changed.notify_all()


def start_reserve(config: Config) -> tuple[Any, str]:
    """The actor that says which prompts in reserve are needed, with its name; (None, "") without a reserve."""
    size = config.rollout.reserve_prompts
    if not size:
        return None, ""
    name = f"{config.run.name}/reserve"
    actor: Any = ray.remote(Reserve)
    options = actor.options(name=name, num_cpus=0, max_concurrency=MAX_CONCURRENCY, max_restarts=-1)
    return options.remote(config.data.train_batch_size, size), name
