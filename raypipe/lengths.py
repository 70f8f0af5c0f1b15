"""Longest expected first: the order in which an iteration's requests come to the engines.

In: the finished samples of earlier iterations, and an iteration's blocks. Out: the same blocks in another order. Where
requests queue at the engines (more than `engine.max_num_seqs` each), all wait for a long one that starts last; started
by falling length, an iteration ends at most a third later than in the best order (Graham 1969, "longest processing
time"). What a prompt's responses took when it was last sampled is what it is expected to take now.

The order is all that depends on the past: which prompts an iteration holds, and with which seeds, does not, so a run
that resumes and remembers nothing makes the same samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raypipe.arrivals import mini_batch_of
from raypipe.config import Config


class ResponseLengths:
    """The mean response length of each prompt when it was last sampled, in tokens."""

    def __init__(self) -> None:
        self.means: dict[tuple[str, str], float] = {}
        self.total = 0.0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the samples of an iteration; those that did not finish say nothing of their length."""
        found: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            if row["finish_reason"] in ("stop", "length"):
                found.setdefault((row["purpose"], row["prompt_id"]), []).append(len(row["response_ids"]))
        for key, lengths in found.items():
            mean = sum(lengths) / len(lengths)
            self.total += mean - self.means.get(key, 0.0)
            self.means[key] = mean

    def expected(self, purpose: str, prompt_id: str) -> float:
        """Tokens of a response; of a prompt that is not known, the mean of those that are."""
        return self.means.get((purpose, prompt_id), self.total / max(1, len(self.means)))


def longest_first(blocks: Sequence[pa.Table], lengths: ResponseLengths, config: Config) -> list[pa.Table]:
    """An iteration's blocks (`plans.iteration_blocks`), those of each mini-batch by falling expected length.

    Mini-batches stay one after another, since the learner steps in that order, but where they are made of the prompts
    that are complete first (rollout.carry_over); then come the reserve, by number, and the held-out prompts, which fill
    the tail. Without a history nothing moves.
    """
    mini_batches = 1 if config.rollout.carry_over else config.train.mini_batches

    def place(block: pa.Table) -> tuple[int, float]:
        row = {name: block[name][0].as_py() for name in ("purpose", "reserve", "group_id", "prompt_id")}
        expected = lengths.expected(row["purpose"], row["prompt_id"])
        if row["purpose"] != "train":
            return mini_batches + 1, -expected
        if row["reserve"] >= 0:
            return mini_batches, row["reserve"]
        return mini_batch_of(row["group_id"], config.data.train_batch_size, mini_batches), -expected

    return sorted(blocks, key=place)
