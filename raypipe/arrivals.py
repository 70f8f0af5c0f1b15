"""Which prompts have all their samples: bookkeeping that every rank does alike, so that all agree without asking.

In: what all ranks tell each other of the samples that reached them. Out: groups as they become complete, and
mini-batches as all their groups are. Pure; the learner exchanges, this counts.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which who only counts need not
    from raypipe.targets import Scored


def mini_batch_of(place: int, groups: int, mini_batches: int) -> int:
    """Which mini-batch the prompt at `place` of `groups` belongs to; one past them, of the reserve, to the last."""
    return min(place * mini_batches // groups, mini_batches - 1)


class Arrivals:
    """Args:
    groups: prompts of the iteration; they are numbered from 0. (Without mini-batches any numbers will do.)
    mini_batches: into which they are divided, by number.
    """

    def __init__(self, groups: int, mini_batches: int):
        self.groups, self.mini_batches = groups, mini_batches
        self.open: dict[int, list[Scored]] = {}
        self.missing = [0] * mini_batches  # groups of each mini-batch that are not complete
        for group_id in range(groups):
            self.missing[self.mini_batch(group_id)] += 1

    def mini_batch(self, group_id: int) -> int:
        """Which mini-batch a prompt belongs to."""
        return mini_batch_of(group_id, self.groups, self.mini_batches)

    def add(self, samples: "Iterable[Scored]", ended: bool) -> "list[Scored]":
        """Takes in samples of all ranks; returns those of the groups that this makes complete.

        Args:
            ended: no sample will follow, so that groups which lack some are complete too.
        """
        for sample in samples:
            self.open.setdefault(sample.group_id, []).append(sample)
        found = [group for group in self.open.values() if ended or len(group) == group[0].group_size]
        for group in found:
            self.missing[self.mini_batch(group[0].group_id)] -= 1
            del self.open[group[0].group_id]
        if ended:
            self.missing = [0] * self.mini_batches
        return [sample for group in found for sample in group]

    def is_complete(self, mini_batch: int) -> bool:
        return self.missing[mini_batch] == 0
