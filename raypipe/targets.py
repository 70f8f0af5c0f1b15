"""Graded rows to what the learner trains on: targets for every response token.

In: one rank's rows, whose groups are complete over all ranks. Out: those that go into the loss, each with numpy columns
[T]: `old_logprobs`, `advantages`, and as the algorithm needs them `returns` and `importance`. Ranks exchange a `Scored`
of every sample, and three numbers a rank for whitening, so each computes from whole groups though it holds a part.

A sample that failed in generation or grading, or has no tokens, is not usable: it is no part of its group's baseline
and never reaches the loss. One that is masked (truncated, or too far from the engine) is part of the baseline alone.

Shapes: B samples of this rank, T response tokens, S samples of all ranks.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypipe import advantages, losses
from raypipe.config import Config, importance, old_logprobs

Rows = list[dict[str, Any]]
# What every rank passes in comes back from all of them, in rank order.
Gather = Callable[[Any], list[Any]]

# Columns that are of no use to anyone behind the learner: what it and this module wrote, and what it alone reads.
TARGETS = (
    "old_logprobs", "ref_logprobs", "values", "kl", "advantages", "returns", "importance", "mini_batch",
)  # fmt: skip
WHITENED = ("gae", "reinforce_pp", "reinforce_pp_baseline")


class Scored(NamedTuple):
    """What other ranks need to know of a sample. `reward`: the score less the KL, where that is in the reward."""

    sample_id: str
    group_id: int
    group_size: int
    usable: bool
    score: float
    reward: float


def whitening(config: Config) -> str:
    """none | mini_batch | iteration"""
    algorithm = config.algorithm
    if algorithm.whiten == "auto":
        return "iteration" if algorithm.adv_estimator in WHITENED else "none"
    return algorithm.whiten


def why_not_streaming(config: Config) -> str:
    """What in the config makes the learner wait for an iteration's last sample before it begins; empty if nothing."""
    if not config.train.stream:
        return "train.stream=false"
    if config.pipeline.colocate:
        return "pipeline.colocate: engines and learner take turns"
    if whitening(config) != "none":
        return f"advantages are whitened over the {whitening(config).replace('_', '-')} (algorithm.whiten)"
    if old_logprobs(config) == "learner":
        return "the log-probs of all samples are recomputed first (algorithm.old_logprobs: learner)"
    if config.rollout.reserve_prompts:
        return "rollout.reserve_prompts: which prompts are trained on is known at the end"
    if config.rollout.overprovision and config.train.mini_batches > 1:
        return "rollout.overprovision with train.mini_batches: which prompts each step takes is known at the end"
    return ""


def is_told(row: dict[str, Any]) -> bool:
    """Whether ranks tell one another of the row: the group of any other is none of the iteration's."""
    return row["purpose"] == "train" and row["finish_reason"] != "surplus"


def is_usable(row: dict[str, Any]) -> bool:
    graded = row["purpose"] == "train" and row["grade_status"] == "ok" and len(row["response_ids"]) > 0
    return graded and not row.get("score_error")


def assign_kl(usable: Rows, config: Config) -> losses.Metrics:
    """Gives each row `kl` from the reference, [T], if there is one; the rows have `old_logprobs` already."""
    if not config.algorithm.kl_coef:
        return {}
    mask_BT = response_mask(usable)
    gap_BT = losses.log_ratio(column(usable, "old_logprobs"), column(usable, "ref_logprobs"), mask_BT)
    kl_BT = losses.KL_ESTIMATORS[config.algorithm.kl_estimator](gap_BT)
    assign(usable, "kl", kl_BT)
    return {"ref/kl": losses.tally(kl_BT, mask_BT)}


def scored(row: dict[str, Any], config: Config, kl_coef: float) -> Scored:
    """What this rank tells the others of one of its rows; a usable one has `kl` already."""
    usable, reward = is_usable(row), row["score"]
    if usable and "kl" in row and config.algorithm.kl_in == "reward":
        reward -= kl_coef * float(row["kl"].sum())
    return Scored(row["sample_id"], row["group_id"], row["group_size"], usable, row["score"], reward)


def assign_advantages(usable: Rows, config: Config, kl_coef: float, everyone: Sequence[Scored]) -> None:
    """Gives each row `advantages`, and with a critic `returns`, [T]; not whitened yet.

    Args:
        everyone: the samples of all ranks, of whole groups.
    """
    algorithm, mask_BT = config.algorithm, response_mask(usable)
    if algorithm.adv_estimator in advantages.ESTIMATORS:
        advantages_B = group_advantages(usable, algorithm.adv_estimator, everyone)
        assign(usable, "advantages", torch.where(mask_BT, advantages_B[:, None], 0.0))
        return
    scores_B = torch.tensor([row["score"] for row in usable], dtype=torch.float64)
    coef = kl_coef if algorithm.kl_in == "reward" else 0.0
    kl_BT = column(usable, "kl") if coef else torch.zeros(mask_BT.shape, dtype=torch.float64)
    rewards_BT = advantages.token_rewards(scores_B, kl_BT, mask_BT, coef)
    if algorithm.adv_estimator == "reinforce_pp":
        assign(usable, "advantages", advantages.reinforce_pp(rewards_BT, mask_BT, algorithm.gamma))
        return
    values_BT = column(usable, "values")
    advantages_BT, returns_BT = advantages.gae(rewards_BT, values_BT, mask_BT, algorithm.gamma, algorithm.lam)
    assign(usable, "advantages", advantages_BT)
    assign(usable, "returns", returns_BT)


def group_advantages(usable: Rows, estimator: str, everyone: Sequence[Scored]) -> Tensor:
    """Advantages [B] from the rewards of whole groups, whose members may lie on other ranks; float64."""
    everyone = sorted(everyone)  # alike on every rank, however rows were split
    if not everyone:
        return torch.zeros(0, dtype=torch.float64)
    values_S = advantages.ESTIMATORS[estimator](
        torch.tensor([sample.reward for sample in everyone], dtype=torch.float64),
        torch.tensor([sample.group_id for sample in everyone]),
        torch.tensor([sample.usable for sample in everyone]),
    )
    by_id = {sample.sample_id: value for sample, value in zip(everyone, values_S.tolist(), strict=True)}
    return torch.tensor([by_id[row["sample_id"]] for row in usable], dtype=torch.float64)


def split_masked(usable: Rows, config: Config) -> tuple[Rows, losses.Metrics]:
    """The rows that go into the loss; the others are counted in the metrics."""
    algorithm = config.algorithm
    keep_B = torch.ones(len(usable), dtype=torch.bool)
    metrics: losses.Metrics = {}
    if algorithm.mask_truncated:
        cut_B = torch.tensor([row["finish_reason"] == "length" for row in usable], dtype=torch.bool)
        metrics["train/masked_truncated_frac"] = losses.tally(cut_B, torch.ones_like(cut_B))
        keep_B &= ~cut_B
    if algorithm.seq_ratio_low or algorithm.seq_ratio_high or algorithm.token_ratio_low:
        mask_BT, found = losses.sequence_mask(
            column(usable, "old_logprobs"), column(usable, "engine_logprobs"), response_mask(usable),
            low=algorithm.seq_ratio_low, high=algorithm.seq_ratio_high or float("inf"),
            token_low=algorithm.token_ratio_low,
        )  # fmt: skip
        metrics["mismatch/masked_frac"] = found["masked_frac"]
        keep_B &= mask_BT.any(1)
    return [row for row, keep in zip(usable, keep_B.tolist(), strict=True) if keep], metrics


def assign_importance(rows: Rows, config: Config) -> losses.Metrics:
    """Gives each row `importance`, its truncated importance weights [T], if they are asked for."""
    level = importance(config)
    if level == "none":
        return {}
    weights_BT, metrics = losses.TIS[level](
        column(rows, "old_logprobs"), column(rows, "engine_logprobs"), response_mask(rows), config.algorithm.tis_cap
    )
    assign(rows, "importance", weights_BT)
    return {f"mismatch/{name}": pair for name, pair in metrics.items()}


def whiten(rows: Rows, gather: Gather) -> None:
    """Brings the advantages of all ranks' `rows` to mean 0 and variance 1."""
    advantages_BT, mask_BT = column(rows, "advantages"), response_mask(rows)
    parts = gather(advantages.moments(advantages_BT, mask_BT).tolist())
    total = advantages.merge_moments(torch.tensor(parts, dtype=torch.float64))
    assign(rows, "advantages", advantages.whiten(advantages_BT, mask_BT, total))


def explained_variance(rows: Rows, gather: Gather) -> float:
    """Of the returns by the values that were scored, over all ranks' rows."""
    returns_BT, mask_BT = column(rows, "returns"), response_mask(rows)
    errors_BT = returns_BT - column(rows, "values")
    parts = gather([advantages.moments(values_BT, mask_BT).tolist() for values_BT in (errors_BT, returns_BT)])
    errors, returns = (torch.tensor([part[i] for part in parts], dtype=torch.float64) for i in (0, 1))
    return advantages.explained_variance(advantages.merge_moments(errors), advantages.merge_moments(returns))


def without_signal(everyone: Collection[Scored]) -> set[int]:
    """Groups whose usable samples all have one score."""
    scores: dict[int, set[float]] = {}
    for sample in everyone:
        scores.setdefault(sample.group_id, set()).update([sample.score] if sample.usable else [])
    return {group_id for group_id, found in scores.items() if len(found) < 2}


def response_mask(rows: Rows) -> Tensor:
    """[B, T] bool, True at the tokens of each row's response."""
    lengths_B = torch.tensor([len(row["response_ids"]) for row in rows], dtype=torch.long)
    longest = int(lengths_B.max()) if len(rows) else 0
    return torch.arange(longest) < lengths_B[:, None]


def column(rows: Rows, name: str) -> Tensor:
    """A column with one value a response token as [B, T] float64, 0 padded."""
    mask_BT = response_mask(rows)
    flat = [np.asarray(row[name], np.float64) for row in rows]
    values_N = torch.from_numpy(np.concatenate(flat)) if flat else torch.zeros(0, dtype=torch.float64)
    return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(mask_BT, values_N)


def assign(rows: Rows, name: str, values_BT: Tensor) -> None:
    """Writes [B, T] into the rows as float32 [T]."""
    for row, values_T in zip(rows, values_BT.float().numpy(), strict=True):
        row[name] = values_T[: len(row["response_ids"])]
