"""Carrying over: an iteration ends while some of its prompts are still under way, and the next one trains on those.

In: the rows of an iteration's plan, as they reach this rank. Out: those of `data.train_batch_size` whole groups: all
that the plan before has left, and of the plan's own the first to be complete. So nothing is carried over twice. Rows of
other groups wait here, and their plan stays open for an iteration more.

This is the partial rollout of Kimi k1.5 (arXiv 2501.12599, section 2.6.2), except that a response which is carried over
is not stopped: it runs on through the weight update (pipeline.inflight_update).

Worked example, batch 4, 1 carried over (rollout.carry_over=0.25), 3 iterations:

    plan 0 starts prompts 0 to 4; 3 is the last        trained: 0 1 2 4
    plan 1 starts prompts 5 to 8; 6 is the last        trained: 3 5 7 8
    plan 2 starts prompts 9 to 11                      trained: 6 9 10 11

A prompt is known by its position in the order of all prompts (`PromptOrder`). Positions of what is under way are a part
of the checkpoint, and a learner that goes on from there has these prompts started anew.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raypipe.config import Config, carried_prompts

if TYPE_CHECKING:  # it imports torch, which the plan server need not
    from raypipe.streaming import Take

# Seconds that a wait for one plan's rows may hold up those of the plan before.
PATIENCE_S = 0.05
Key = tuple[int, int]  # iteration whose plan started a group, and its group_id there


def planned(config: Config, iteration: int, first: int = 0, again: Sequence[int] = ()) -> list[int]:
    """As `started`, where a learner began with iteration `first`, and with `again`."""
    left = left_by(config, iteration, first, again)
    return started(config, iteration, left, again if iteration == first else ())


def started(config: Config, iteration: int, left: int, again: Sequence[int] = ()) -> list[int]:
    """Positions of the prompts that the plan of `iteration` starts, by their group_id.

    Args:
        left: how many the plan before has left.
        again: positions of those that were under way at the checkpoint which the learner goes on from.
    """
    first = iteration * config.data.train_batch_size + left + len(again)
    return [*again, *range(first, first + max(0, wanted(config, iteration) - left - len(again)))]


def left_by(config: Config, iteration: int, first: int, again: Sequence[int]) -> int:
    """How many prompts the plan of `iteration` finds left, where a learner began with `first`, and with `again`."""
    if iteration <= first:
        return 0
    left = len(again)
    for each in range(first, iteration):
        left = max(0, max(left, wanted(config, each)) - config.data.train_batch_size)
    return left


def wanted(config: Config, iteration: int) -> int:
    """Prompts that are under way in an iteration; the last one has no other to leave any to."""
    is_last = iteration + 1 >= config.run.iterations
    return config.data.train_batch_size + (0 if is_last else carried_prompts(config))


class CarryOver:
    """What is under way, as every rank knows it, and this rank's rows of it.

    Args:
        gather: what every rank passes in comes back from all of them, in rank order.
        again: as of `started`, for the first iteration.

    Attributes:
        positions: of the prompts that are under way behind the last iteration that was settled.
    """

    def __init__(self, config: Config, gather: Callable[[Any], list[Any]], again: Sequence[int] = ()):
        self.config, self.gather, self.positions = config, gather, list(again)
        self.again = list(again)
        self.under_way: dict[Key, int] = {}  # positions
        self.missing: dict[Key, int] = {}  # samples that no rank has yet, of groups of which some rank has one
        self.rows: dict[Key, list[dict[str, Any]]] = {}
        self.open: dict[int, Take] = {}  # plans that this rank has not read to the end

    def taker(self, iteration: int, take: "Take", evaluates: bool) -> "Take":
        """As `take`, which reads the iteration's plan, with the rows of whole groups alone; these are numbered anew, in
        the order in which they are complete. It ends on all ranks at the same call; they all call it together.

        Args:
            evaluates: whether the plan has held-out samples, of which none is carried over.
        """
        left = set(self.under_way)
        for group_id, position in enumerate(started(self.config, iteration, len(left), self.again)):
            self.under_way[iteration, group_id] = position
        self.again, self.open[iteration] = [], take
        batch = self.config.data.train_batch_size
        room = max(0, batch - len(left))  # for groups of this plan
        number = 0

        def rows_of_whole_groups(seconds: float) -> tuple[list[dict[str, Any]], bool]:
            nonlocal number, room
            heldout, open_plans = self._read(min(seconds, PATIENCE_S))
            found: list[dict[str, Any]] = []
            for key in [key for key in self.under_way if self._is_whole(key, open_plans)]:
                if number == batch or not (key in left or room):
                    continue
                room -= key not in left
                del self.under_way[key]
                self.missing.pop(key, None)
                found += [row | {"group_id": number} for row in self.rows.pop(key, [])]
                number += 1
            ended = not open_plans or (number == batch and not evaluates and open_plans == {iteration})
            return found + heldout, ended

        return rows_of_whole_groups

    def _read(self, seconds: float) -> tuple[list[dict[str, Any]], set[int]]:
        """Takes in what has arrived; returns this rank's held-out rows, and the plans that any rank still reads."""
        heldout, news = [], []
        for iteration in sorted(self.open):
            rows, ended = self.open[iteration](seconds if iteration == max(self.open) else 0.0)
            if ended:
                del self.open[iteration]
            for row in rows:
                if row["purpose"] != "train":
                    heldout.append(row)
                    continue
                key = iteration, row["group_id"]
                self.rows.setdefault(key, []).append(row)
                news.append((key, row["group_size"]))
        told = self.gather((news, list(self.open)))
        for key, size in (each for samples, _ in told for each in samples):
            self.missing[key] = self.missing.get(key, size) - 1
        return heldout, {iteration for _, still_open in told for iteration in still_open}

    def _is_whole(self, key: Key, open_plans: set[int]) -> bool:
        return self.missing.get(key) == 0 or key[0] not in open_plans

    def settle(self) -> None:
        """The iteration is trained: what is under way now is the next one's."""
        self.positions = list(self.under_way.values())
