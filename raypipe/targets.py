"""Graded rows to what the learner trains on: an advantage for every response token.

In: one rank's rows of an iteration. Out: the usable ones, each with `advantages` [T]. Ranks exchange (sample, group,
score) of every sample, and three numbers a rank for whitening, so each computes from the whole iteration though it
holds a part. A sample that failed in generation or grading, or has no tokens, is not usable: it is no part of its
group's baseline and never reaches the loss.

Shapes: B samples of this rank, T response tokens, S samples of all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raypipe import advantages
from raypipe.config import Config

Rows = list[dict[str, Any]]
# What every rank passes in comes back from all of them, in rank order.
Gather = Callable[[Any], list[Any]]

WHITENED = ("reinforce_pp", "reinforce_pp_baseline")


def assign_advantages(rows: Rows, config: Config, gather: Gather) -> Rows:
    """The usable rows of `rows`, with `advantages` (float32 [T]); every rank calls it, also without rows."""
    usable = [row for row in rows if is_usable(row)]
    mask_BT = response_mask(usable)
    estimator = config.algorithm.adv_estimator
    if estimator == "reinforce_pp":
        scores_B = torch.tensor([row["score"] for row in usable], dtype=torch.float64)
        rewards_BT = advantages.token_rewards(scores_B, torch.zeros(mask_BT.shape), mask_BT, 0.0)
        advantages_BT = advantages.reinforce_pp(rewards_BT, mask_BT, config.algorithm.gamma)
    else:
        advantages_BT = torch.where(mask_BT, group_advantages(usable, estimator, gather)[:, None], 0.0)
    if estimator in WHITENED:
        parts = gather(advantages.moments(advantages_BT, mask_BT).tolist())
        advantages_BT = advantages.whiten(
            advantages_BT, mask_BT, advantages.merge_moments(torch.tensor(parts, dtype=torch.float64))
        )
    for row, values_T in zip(usable, advantages_BT.float().numpy(), strict=True):
        row["advantages"] = values_T[: len(row["response_ids"])]
    return usable


def is_usable(row: dict[str, Any]) -> bool:
    return row["purpose"] == "train" and row["grade_status"] == "ok" and len(row["response_ids"]) > 0


def group_advantages(usable: Rows, estimator: str, gather: Gather) -> Tensor:
    """Advantages [B] from the scores of whole groups, whose members may lie on other ranks; float64."""
    parts = gather([(row["sample_id"], row["group_id"], row["score"]) for row in usable])
    everyone = sorted(sample for part in parts for sample in part)  # alike on every rank, however rows were split
    if not everyone:
        return torch.zeros(0, dtype=torch.float64)
    ids, groups, scores = zip(*everyone, strict=True)
    values_S = advantages.ESTIMATORS[estimator](
        torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.ones(len(ids), dtype=torch.bool)
    )
    by_id = dict(zip(ids, values_S.tolist(), strict=True))
    return torch.tensor([by_id[row["sample_id"]] for row in usable], dtype=torch.float64)


def response_mask(rows: Rows) -> Tensor:
    """[B, T] bool, True at the tokens of each row's response."""
    lengths_B = torch.tensor([len(row["response_ids"]) for row in rows], dtype=torch.long)
    longest = int(lengths_B.max()) if len(rows) else 0
    return torch.arange(longest) < lengths_B[:, None]
