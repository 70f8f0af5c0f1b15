"""What is minimised on one micro-batch: the configured sum of policy loss, KL, entropy, and the critic's value loss.

In: new log-probs (or values) of a micro-batch and what `targets.py` assigned to its tokens. Out: `(loss, metrics)`. The
decision: losses are sums over tokens, not means. The denominator, which counts the whole mini-batch on all ranks,
divides the gradient when the mini-batch is complete, so micro-batches may run before the last sample has arrived.

Shapes: B samples, T response tokens.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from raypipe import losses
from raypipe.config import AlgorithmConfig, CriticConfig
from raypipe.losses import Metrics


def policy_objective(
    algorithm: AlgorithmConfig,
    logprobs_BT: Tensor,
    entropy_BT: Tensor,
    targets: Mapping[str, Tensor],
    mask_BT: Tensor,
    *,
    kl_coef: float,
    max_response_length: int,
) -> tuple[Tensor, Metrics]:
    """Loss of the policy, to be divided by `losses.count` of the mini-batch.

    Args:
        targets: [B, T] each: old_logprobs, advantages; ref_logprobs with a KL in the loss; importance with TIS.
        kl_coef: the coefficient of the KL at this time.
    """
    weights_BT = losses.token_weights(mask_BT, algorithm.loss_agg, 1.0, max_response_length)
    policy_loss = losses.POLICY_LOSSES[algorithm.policy_loss]
    if algorithm.dual_clip:
        policy_loss = partial(policy_loss, dual_clip=algorithm.dual_clip)
    loss, metrics = policy_loss(
        logprobs_BT, targets["old_logprobs"], targets["advantages"], mask_BT,
        weights_BT * targets["importance"] if "importance" in targets else weights_BT,
        clip_low=algorithm.clip_low, clip_high=algorithm.clip_high,
    )  # fmt: skip
    metrics["kl"] = metrics.pop("approx_kl")
    metrics["entropy"] = losses.tally(entropy_BT, mask_BT)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * losses.weighted_sum(entropy_BT, weights_BT)
    if algorithm.kl_in == "loss" and algorithm.kl_coef:
        kl_BT = losses.KL_ESTIMATORS[algorithm.kl_estimator](
            losses.log_ratio(logprobs_BT, targets["ref_logprobs"], mask_BT)
        )
        loss = loss + kl_coef * losses.weighted_sum(kl_BT, weights_BT)
    return loss, {f"policy/{name}": pair for name, pair in metrics.items()}


def value_objective(
    critic: CriticConfig, values_BT: Tensor, targets: Mapping[str, Tensor], mask_BT: Tensor
) -> tuple[Tensor, Metrics]:
    """Loss of the critic, to be divided by the tokens of the mini-batch. `targets`: values, as scored, and returns."""
    loss, metrics = losses.value_loss(
        values_BT, targets["values"], targets["returns"], mask_BT, mask_BT.double(),
        clip_range=critic.value_clip or math.inf,
    )  # fmt: skip
    metrics["loss"] = torch.stack([loss.detach(), mask_BT.sum().double()])
    metrics["value"] = losses.tally(values_BT, mask_BT)
    return loss, {f"critic/{name}": pair for name, pair in metrics.items()}


def mismatch(engine_BT: Tensor, logprobs_BT: Tensor, mask_BT: Tensor) -> tuple[Metrics, float]:
    """How far the engines' log-probs are from the learner's on the same weights: metrics, and the largest gap."""
    gap_BT = losses.log_ratio(engine_BT, logprobs_BT.detach(), mask_BT)
    metrics = {
        "mismatch/mean": losses.tally(gap_BT.abs(), mask_BT),
        "mismatch/kl": losses.tally(losses.k3(gap_BT), mask_BT),  # of KL(engine || learner), per token
    }
    return metrics, float(gap_BT.abs().max())
