"""The streaming epoch: train on what has a whole group behind it while other samples are still generated and graded.

In: rows as they reach this rank. Out: the same gradient, to rounding, as from all rows at once. Micro-batches form
naturally: a full one is trained on at once, and a smaller one when nothing else has come to do. Ranks work in rounds:
each tells the others what has arrived and how many micro-batches it asks for, and then all run the largest such number,
so that FSDP's collectives match. A mini-batch gets its optimizer step once all its groups are in; what arrives for
later ones waits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raypipe.arrivals import Arrivals
from raypipe.targets import Rows

if TYPE_CHECKING:
    from raypipe.learner import Learner

# Seconds that a rank waits for a row before it looks whether the others have something to do.
PATIENCE_S = 0.02
# take(seconds): rows that have arrived, after a wait of at most so long for one, and whether none will follow.
Take = Callable[[float], tuple[Rows, bool]]


class Stopped(Exception):
    """The run is to end, and no step of the iteration has been taken: the weights are those that it began with."""


class Spans:
    """Collects what a rank did when: `with spans("train"): ...`; `phase` is what it does since `since`."""

    def __init__(self, rank: int = 0) -> None:
        self.lane = f"learner-{rank}"
        self.spans: list[dict[str, Any]] = []
        self.phase, self.since = "starting", time.time()

    def collect(self) -> list[dict[str, Any]]:
        """What was collected since the last call."""
        found, self.spans = self.spans, []
        return found

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.time()
        if name != self.phase:
            self.phase, self.since = name, start
        yield
        end = time.time()
        if self.spans and self.spans[-1]["name"] == name:  # goes on with what it did last
            self.spans[-1]["end"] = end
        else:
            self.spans.append({"lane": self.lane, "name": name, "start": start, "end": end})


def stream(learner: "Learner", take: Take, spans: Spans) -> tuple[Rows, Rows]:
    """The first epoch of an iteration; returns all rows, and those that went into the loss. All ranks call it.

    Raises Stopped, on all ranks, when the run is to end and no step was taken yet; else the iteration is done first.
    """
    config = learner.config
    count = config.train.mini_batches
    arrivals = Arrivals(config.data.train_batch_size, count)
    rows: Rows = []
    trained: Rows = []
    incomplete: dict[str, dict[str, Any]] = {}  # rows whose group is not whole, by sample
    ready: list[Rows] = [[] for _ in range(count)]  # of each mini-batch
    mini, ended, all_ended = 0, False, False
    while mini < count or not all_ended:
        whole = mini < count and arrivals.is_complete(mini)
        with spans("wait for rows"):
            found, ended = ([], True) if ended else take(0.0 if whole else PATIENCE_S)
            batches = learner.split(ready[mini]) if mini < count else []
            wanted = len(batches) if whole or not found else max(0, len(batches) - 1)  # the last may still grow
            told = learner.gather((learner.examine(found), ended, wanted, learner.stopping()))
        if learner.untouched and any(stop for *_, stop in told):
            raise Stopped
        rows += found
        incomplete |= {row["sample_id"]: row for row in found}
        runs = max(asked for _, _, asked, _ in told)
        all_ended = all(end for _, end, _, _ in told)
        if runs or whole:
            with spans("train"):
                learner.micro_steps(batches[:runs], runs)
                ready[mini] = [row for batch in batches[runs:] for line in batch for row in line]
                if whole:
                    learner.step()
                    mini += 1
        everyone = arrivals.add([sample for news, *_ in told for sample in news], all_ended)
        own = [incomplete.pop(sample.sample_id) for sample in sorted(everyone) if sample.sample_id in incomplete]
        learner.prompts += len({sample.group_id for sample in everyone if sample.usable})
        for row in learner.admit(own, everyone):
            row["mini_batch"] = arrivals.mini_batch(row["group_id"])
            ready[row["mini_batch"]].append(row)
            trained.append(row)
    return rows, trained
