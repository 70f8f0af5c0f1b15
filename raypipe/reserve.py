"""Prompts in reserve: more of them in a plan than an iteration trains on, for dynamic sampling and for over-provision.

In: the scores of each sample as it is graded. Out: which prompts of the reserve are needed, and when there are enough.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a prompt whose samples all have one score has no group
advantage. The requests of `rollout.reserve_prompts` further prompts wait here before they go to an engine, and one
prompt is let go for each group without signal. Those that are not needed leave the plan unused, so that it ends.

Over-provision: the first prompts of the reserve, `rollout.overprovision` of a batch, are let go at once. When as many
groups are graded as the iteration wants, the others are surplus: what still runs is aborted at the engines. One actor
says which groups were first, so that the learner gets exactly as many as it wants, each whole.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray

from raypipe.config import Config, extra_prompts, reserve_size

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
        wanted: useful groups that the iteration is to have, and groups that it begins with.
        reserve: prompts in reserve, numbered from 0.
        extra: those of them that start with the others.
        needs_signal: whether a group is useful only if its scores differ.
    """

    def __init__(self, wanted: int, reserve: int, extra: int = 0, needs_signal: bool = True):
        self.wanted, self.reserve, self.needs_signal = wanted, reserve, needs_signal
        self.released = extra  # prompts of the reserve that are needed: those numbered below this
        self.useful = self.lost = 0
        self.open: dict[int, dict[str, float | None]] = {}
        self.surplus: dict[int, bool] = {}  # of each group that is complete

    @property
    def is_enough(self) -> bool:
        """Every group that is not complete is surplus."""
        return self.useful >= self.wanted

    @property
    def is_settled(self) -> bool:
        """No further prompt will be released."""
        return self.is_enough or self.useful + self.lost == self.wanted + self.released

    def add(self, samples: Iterable[Graded]) -> None:
        """Takes in graded samples; one that is told of twice counts once."""
        for sample in samples:
            if sample.group_id in self.surplus:
                continue
            scores = self.open.setdefault(sample.group_id, {})
            scores[sample.sample_id] = sample.score
            if len(scores) == sample.group_size:
                self.surplus[sample.group_id] = self.is_enough
                self._count({score for score in self.open.pop(sample.group_id).values() if score is not None})

    def _count(self, scores: set[float]) -> None:
        if len(scores) > 1 or not self.needs_signal:
            self.useful += 1
            return
        self.lost += 1
        if self.released < self.reserve:
            self.released += 1


class Reserve:
    """An async Ray actor, one a run: the supplies of its plans.

    Args: as of `Supply`.
    """

    def __init__(self, wanted: int, reserve: int, extra: int = 0, needs_signal: bool = True):
        self.settings = (wanted, reserve, extra, needs_signal)
        self.supplies: dict[str, Supply] = {}
        self.changed = asyncio.Condition()
        self.forgotten: set[str] = set()

    async def open(self, plan: str) -> None:
        """The plan begins."""
        self.supplies[plan] = Supply(*self.settings)

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

    async def enough(self, plan: str) -> None:
        """Returns once every group of the plan that is not complete is surplus, or nobody waits for the plan."""
        async with self.changed:
            await self.changed.wait_for(lambda: plan in self.forgotten or self._supply(plan).is_enough)

    async def is_surplus(self, plan: str, group_id: int) -> bool:
        """What `graded` said of a group; of one that it was not told of, whether there are enough without it."""
        return plan in self.forgotten or self._supply(plan).surplus.get(group_id, self._supply(plan).is_enough)

    async def graded(self, plan: str, samples: list[Graded]) -> bool:
        """Takes in training samples of one group of the plan that have been graded; returns whether the group is
        surplus. Asked again it says the same."""
        if plan in self.forgotten:
            return True
        async with self.changed:
            self._supply(plan).add(samples)
            self.changed.notify_all()
            return self._supply(plan).surplus.get(samples[0].group_id, False)

    async def forget(self, plan: str) -> None:
        """The plan is over: what still waits for it is not needed."""
        async with self.changed:
            self.forgotten.add(plan)
            self.supplies.pop(plan, None)
            self.changed.notify_all()


def start_reserve(config: Config) -> tuple[Any, str]:
    """The actor that says which prompts in reserve are needed, with its name; (None, "") without a reserve."""
    if not reserve_size(config):
        return None, ""
    name = f"{config.run.name}/reserve"
    actor: Any = ray.remote(Reserve)
    options = actor.options(name=name, num_cpus=0, max_concurrency=MAX_CONCURRENCY, max_restarts=-1)
    wanted, needs_signal = config.data.train_batch_size, config.rollout.reserve_prompts > 0
    return options.remote(wanted, reserve_size(config), extra_prompts(config), needs_signal), name
