"""The learner's loop without a model's work: ranks that read, exchange, split and step, and wait where a GPU computes.

In: a `ScriptedRun`. Out: each iteration's record, reported as a learner rank reports it. A module of its own, so that
Ray's workers import it.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from raypipe.carry import CarryOver
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
        self.compute([row for batch in batches for line in batch for row in line], 1.0)

    def recompute_logprobs(self, rows: list[dict[str, Any]]) -> None:
        self.compute(rows, 1 / 3)  # forward alone
        for row in rows:
            row["old_logprobs"] = row["engine_logprobs"]

    def compute(self, rows: list[dict[str, Any]], part: float) -> None:
        """All ranks take as long as the one with the most tokens, as collectives would have them."""
        tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
        time.sleep(part * max(self.gather(tokens)) / self.tokens_per_s)


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
        carry = CarryOver(config, learner.gather)
        for iteration in range(config.run.iterations):
            spans, take = Spans(self.rank), feed.taker(iteration)
            if config.rollout.carry_over:
                take = carry.taker(iteration, take, evaluates=False)
            record = learner.iterate(iteration, take, spans)
            carry.settle()
            with spans("update weights"):
                if self.rank == 0:
                    time.sleep(update_s)
                    run.open_gates(iteration + 1)
                dist.barrier()
            run.server.report.remote(0, iteration, self.rank, {**record, "spans": spans.spans})
