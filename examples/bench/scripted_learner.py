"""The learner's loop without a model's work: ranks that read, exchange, split and step, and wait where a GPU computes.

In: a `ScriptedRun`. Out: each iteration's record, reported as a learner rank reports it. A module of its own, so that
Ray's workers import it.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from raypipe.learner import Learner
from raypipe.scripted import ScriptedRun
from raypipe.streaming import Spans


class ScriptedLearner(Learner):
    """The learner, whose forward and backward passes are waits.

    Args: `tokens_per_s` of a rank; else as of `Learner`.
    """

    def __init__(self, config: Any, tokens_per_s: float):
        super().__init__(config, torch.device("cpu"))
        self.tokens_per_s = tokens_per_s

    def micro_steps(self, batches: list[Any], count: int) -> None:
        """All ranks take as long as the one with the most tokens, as collectives would have them."""
        rows = [row for batch in batches for line in batch for row in line]
        tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
        time.sleep(max(self.gather(tokens)) / self.tokens_per_s)


class Rank:
    """A Ray actor that does what `raypipe.learner.learn` does, over engines that take no weights.

    Args:
        rank: its number.
        meeting: path of a file, not there yet, where the ranks find each other.
    """

    def __init__(self, rank: int, ranks: int, meeting: str):
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        self.rank = rank

    def learn(self, run: ScriptedRun, tokens_per_s: float, update_s: float) -> None:
        """Trains all iterations of `run`; new weights take `update_s` to the engines."""
        config, feed = run.config, run.feed(self.rank)
        learner = ScriptedLearner(config, tokens_per_s)
        for iteration in range(config.run.iterations):
            spans = Spans(self.rank)
            record = learner.iterate(iteration, feed.taker(iteration), spans)
            with spans("update weights"):
                if self.rank == 0:
                    time.sleep(update_s)
                    run.open_gates(iteration + 1)
                dist.barrier()
            run.server.report.remote(0, iteration, self.rank, {**record, "spans": spans.spans})
