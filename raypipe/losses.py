"""Policy, value and regularisation losses, summed so that parts of a batch add up to the whole.

In: log-probs (or values) of the tokens of a micro-batch with their mask and weights. Out: `(loss, metrics)`. The design
decision: a loss is the *sum* of `weights_BT * token_loss_BT`, and all that a mean is over sits in the weights: mask,
aggregation mode, importance weights, and a denominator that the caller counts over the whole mini-batch and all ranks.
So one batch of 8 = two micro-batches of 4 = two ranks of 4. Metrics are `[sum, count]` pairs, which add up likewise:

    weights_BT = token_weights(mask_BT, "token_mean", denominator=tokens_of_the_mini_batch_over_all_ranks)
    loss, metrics = ppo_clip(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, weights_BT, clip_low=..., ...)
    loss = loss + kl_coef * weighted_sum(k3(log_ratio(logprobs_BT, ref_logprobs_BT, mask_BT)), weights_BT)
    loss.backward()  # gradients of micro-batches and ranks are summed (FSDP averages: set_gradient_divide_factor(1.0))

A caller that does not know the denominator yet (samples still arrive) passes 1 and divides the gradient at the step.

Shapes: B samples, T response tokens, V vocabulary. Masks are bool, True at response tokens that count; where a function
takes one, what stands outside (padding, NaN, -inf) touches neither value nor gradient. Log-probs: float32 or float64.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Metrics = dict[str, Tensor]  # each a float64 [sum, count]; the mean is sum / count, of any number of added pairs

# exp(20) = 5e8: no real ratio is near it, and beyond e^88 float32 has inf, whose product with an advantage of 0 is NaN.
MAX_LOG_RATIO = 20.0


# -- what the mean is over ---------------------------------------------------------------------------------------------

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo")


def count(mask_BT: Tensor, mode: str) -> int:
    """This part's share of the denominator of `mode`, to be summed over micro-batches and ranks.

    Tokens of the mask for token_mean, else samples that have one. Mask (1, 1, 1), (1, 0, 0), (0, 0, 0): 4, else 2.
    """
    return int(mask_BT.sum() if mode == "token_mean" else mask_BT.any(1).sum())


def token_weights(mask_BT: Tensor, mode: str, denominator: float, max_length: int | None = None) -> Tensor:
    """Weight of each token in the loss, [B, T] float64, 0 outside the mask; multiply in further weights as you like.

    Args:
        mode: token_mean            1 / denominator: every token counts the same (DAPO)
              seq_mean_token_sum    1 / denominator: the same weights, but the denominator counts samples
              seq_mean_token_mean   1 / (tokens of the sample * denominator): every sample counts the same (GRPO)
              dr_grpo               1 / (max_length * denominator): no length bias (Dr.GRPO)
        denominator: `count` of the whole mini-batch over all ranks; 0, when all of it is masked, gives a loss of 0.
        max_length: the constant of dr_grpo, usually the largest response length, in tokens.

    Token losses (1, 2, 3), (4, 5, 6) with mask (1, 1, 1), (1, 0, 0): token_mean (1+2+3+4)/4 = 2.5;
    seq_mean_token_sum (6+4)/2 = 5; seq_mean_token_mean (2+4)/2 = 3; dr_grpo with max_length 3: (6/3 + 4/3)/2 = 1.6667.
    Raises ValueError for another mode, and for dr_grpo without max_length.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss aggregation {mode!r} is not one of {', '.join(AGGREGATIONS)}")
    weights_BT = mask_BT.double() / (denominator or 1.0)
    if mode == "seq_mean_token_mean":
        return weights_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    if mode == "dr_grpo":
        if not max_length:
            raise ValueError("loss aggregation 'dr_grpo' divides by a fixed length: give max_length, in tokens")
        return weights_BT / max_length
    return weights_BT


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """`sum(weights * values)`, a float64 scalar; values where the weight is 0 are not read.

    The term of a loss without metrics of its own: `kl_coef * weighted_sum(k3(...), weights_BT)` for a KL in the loss,
    `-entropy_coef * weighted_sum(entropy_BT, weights_BT)` for an entropy bonus.
    """
    return (torch.where(weights_BT != 0, values_BT, 0.0) * weights_BT).sum()


def tally(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`[sum, count]` of a metric over the mask, float64 and detached. Values 1, 2, 9 with mask 1, 1, 0: [3, 2]."""
    values_BT = torch.where(mask_BT, values_BT.detach().double(), 0.0)
    return torch.stack([values_BT.sum(), mask_BT.sum().double()])


def add_metrics(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of a whole from those of its parts: pairs of one name are added."""
    total: Metrics = {}
    for part in parts:
        for name, pair in part.items():
            total[name] = total[name] + pair if name in total else pair
    return total


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Sum / count of each metric; NaN where nothing was counted."""
    pairs = {name: pair.tolist() for name, pair in metrics.items()}
    return {name: total / n if n else math.nan for name, (total, n) in pairs.items()}


# -- policy losses -----------------------------------------------------------------------------------------------------


def log_ratio(logprobs_BT: Tensor, other_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`logprobs - other`, 0 outside the mask, where the gradient is 0 too whatever stands there."""
    return torch.where(mask_BT, logprobs_BT - other_logprobs_BT, 0.0)


def bounded_exp(log_ratio_BT: Tensor) -> Tensor:
    """The ratio itself, finite in any case; without gradient beyond e^+-20."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of each sample's tokens, [B, 1]; 0 for a sample without one. Values are 0 outside the mask."""
    return values_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)


def ppo_clip(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> tuple[Tensor, Metrics]:
    """`max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))` with r = new / old (PPO, arXiv 1707.06347, equation 7).

    `clip_high > clip_low` is DAPO's clip-higher. `dual_clip` c > 1 bounds the loss by -A * c where A < 0, which a huge
    ratio would otherwise make unbounded (arXiv 1912.09729); inf is off.

    Metrics: clip_frac, tokens where the clipped term is the larger; clip_frac_lower, tokens that the dual clip capped;
    approx_kl, the mean of old - new.

    A = 1, r = 1.5, clips 0.2: max(-1.5, -1.2) = -1.2, clipped. A = -1, r = 0.5: max(0.5, 0.8) = 0.8, clipped.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(plain_BT, clipped_BT)
    cap_BT = torch.where(advantages_BT < 0, -advantages_BT * dual_clip, math.inf)
    return weighted_sum(torch.minimum(loss_BT, cap_BT), weights_BT), {
        "clip_frac": tally(clipped_BT > plain_BT, mask_BT),
        "clip_frac_lower": tally(loss_BT > cap_BT, mask_BT),
        "approx_kl": tally(-log_ratio_BT, mask_BT),
    }


def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """PPO clip on one ratio per sequence, s = exp(mean over its tokens of log(new / old)) (GSPO, arXiv 2507.18071).

    The paper's mean within, then over, sequences is the weights' mode seq_mean_token_mean; its clips are near 3e-4.
    Metrics: as `ppo_clip`, counted over tokens. A = 1, log-ratios 0.1, -0.2, 0.3: s = e^(0.2 / 3) = 1.0689.
    """
    advantages_BT = torch.where(mask_BT, advantages_BT, 0.0)
    sequence_B1 = sequence_mean(log_ratio(logprobs_BT, old_logprobs_BT, mask_BT), mask_BT)
    ratio_B1 = bounded_exp(sequence_B1)
    plain_BT = -advantages_BT * ratio_B1
    clipped_BT = -advantages_BT * ratio_B1.clamp(1 - clip_low, 1 + clip_high)
    return weighted_sum(torch.maximum(plain_BT, clipped_BT), weights_BT), {
        "clip_frac": tally(clipped_BT > plain_BT, mask_BT),
        "approx_kl": tally(-sequence_B1.expand_as(mask_BT), mask_BT),
    }


def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """`-clip(r, 1 - clip_low, 1 + clip_high) * A * log(new)`, the clipped ratio detached (CISPO, arXiv 2506.13585).

    The ratio is only a weight, so clipped tokens keep a gradient. The paper leaves out the lower bound: clip_low = 1.
    Metrics: clip_frac, tokens with a ratio outside the bounds; approx_kl.

    A = 2, new log-prob -0.59453, r = 1.5, clip_high 0.28: -1.28 * 2 * -0.59453 = 1.522; gradient -2.56.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, mask_BT).detach()
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    logprobs_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    return weighted_sum(-clipped_BT * advantages_BT * logprobs_BT, weights_BT), {
        "clip_frac": tally(clipped_BT != ratio_BT, mask_BT),
        "approx_kl": tally(-log_ratio_BT, mask_BT),
    }


# One signature; the dual clip is bound beforehand: `functools.partial(ppo_clip, dual_clip=3.0)`.
POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}


# -- trainer against engine --------------------------------------------------------------------------------------------
# Engine and trainer differ in log-probs for the same weights (kernels, precision), and more when the engine's are old.
# Both corrections are detached. Importance weights multiply `weights_BT` and leave a token in the denominator; a
# sequence mask replaces the mask before anything is counted. Source: Yao et al. 2025,
# fengyao.notion.site/off-policy-rl.


def tis_token(logprobs_BT: Tensor, engine_logprobs_BT: Tensor, mask_BT: Tensor, cap: float) -> tuple[Tensor, Metrics]:
    """Truncated importance weights `min(trainer / engine, cap)` per token, [B, T], 0 outside the mask.

    Metrics: tis_truncated_frac, tokens whose ratio is above the cap. Log-probs -0.5 and -1.5, cap 2: min(e, 2) = 2.
    """
    return _truncated(log_ratio(logprobs_BT, engine_logprobs_BT, mask_BT), mask_BT, cap)


def tis_sequence(
    logprobs_BT: Tensor, engine_logprobs_BT: Tensor, mask_BT: Tensor, cap: float
) -> tuple[Tensor, Metrics]:
    """As `tis_token` with one ratio per sequence, the product of its tokens' ratios: unbiased, with high variance.

    Log-ratios 0, 1, -0.5: e^0.5 = 1.6487 on each of the three tokens.
    """
    sequence_B1 = log_ratio(logprobs_BT, engine_logprobs_BT, mask_BT).sum(1, keepdim=True)
    return _truncated(sequence_B1.expand_as(mask_BT), mask_BT, cap)


def _truncated(log_ratio_BT: Tensor, mask_BT: Tensor, cap: float) -> tuple[Tensor, Metrics]:
    raw_BT = log_ratio_BT.detach().exp()
    return torch.where(mask_BT, raw_BT.clamp(max=cap), 0.0), {"tis_truncated_frac": tally(raw_BT > cap, mask_BT)}


TIS: dict[str, Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Metrics]]] = {
    "token": tis_token,
    "sequence": tis_sequence,
}


def sequence_mask(
    logprobs_BT: Tensor,
    engine_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    low: float,
    high: float,
    token_low: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """The mask without the sequences on which trainer and engine disagree, [B, T] bool.

    A sequence stays if the geometric mean of its tokens' ratios trainer / engine is within [low, high] (length does not
    widen it; 0.99 to 1.01, say) and no single ratio is below `token_low` (a veto; 1e-4, say).
    Metrics: masked_frac, sequences dropped. Log-ratios 0, 1, -0.5: e^(0.5 / 3) = 1.18, dropped at high = 1.1.
    """
    log_ratio_BT = log_ratio(logprobs_BT, engine_logprobs_BT, mask_BT).detach()
    mean_B1 = sequence_mean(log_ratio_BT, mask_BT).exp()
    keep_B1 = (mean_B1 >= low) & (mean_B1 <= high) & (log_ratio_BT.exp() >= token_low).all(1, keepdim=True)
    return mask_BT & keep_B1, {"masked_frac": tally(~keep_B1, mask_BT.any(1, keepdim=True))}


# -- value loss, entropy, KL -------------------------------------------------------------------------------------------


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_range: float,
) -> tuple[Tensor, Metrics]:
    """`max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2`; clip_range inf turns the clip off.

    Metrics: clip_frac, tokens where the clipped term is the larger.
    v = 1, v_old = 0.5, R = 1.2, c = 0.2: max(0.2^2, (0.7 - 1.2)^2) / 2 = 0.125, clipped.
    """
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    plain_BT = (values_BT - returns_BT).square()
    held_BT = values_BT.clamp(old_values_BT - clip_range, old_values_BT + clip_range)
    clipped_BT = (held_BT - returns_BT).square()
    return weighted_sum(torch.maximum(plain_BT, clipped_BT) / 2, weights_BT), {
        "clip_frac": tally(clipped_BT > plain_BT, mask_BT)
    }


def entropy(logits_BTV: Tensor) -> Tensor:
    """`-sum p log p` of the softmax of the last dimension, in nats; logits of -inf add 0. Two equal logits: log 2."""
    logprobs_BTV = logits_BTV.log_softmax(-1)
    return -(logprobs_BTV.exp() * logprobs_BTV.masked_fill(logits_BTV == -math.inf, 0.0)).sum(-1)


# Estimates of KL(policy || reference) from tokens that the policy sampled, as functions of their log-ratio
# d = log_ratio(logprobs_BT, ref_logprobs_BT, mask_BT); source: http://joschu.net/blog/kl-approx.html. In the reward all
# serve. In the loss what counts is the gradient, whose mean is 0 for k1 (it regularises nothing), that of
# KL(policy || reference) for k2, and that of KL(reference || policy) for k3.


def k1(d_BT: Tensor) -> Tensor:
    """`d`: unbiased, high variance, may be negative."""
    return d_BT


def k_abs(d_BT: Tensor) -> Tensor:
    """`|d|`: a distance, not an estimate of the KL."""
    return d_BT.abs()


def k2(d_BT: Tensor) -> Tensor:
    """`d^2 / 2`: biased, low variance."""
    return d_BT.square() / 2


def k3(d_BT: Tensor, clamp: float = math.inf) -> Tensor:
    """`exp(-d) - 1 + d`: unbiased, low variance, never negative; at most `clamp`. d = -1: e - 2 = 0.7183."""
    return (torch.expm1(-d_BT) + d_BT).clamp(max=clamp)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "abs": k_abs, "k2": k2, "k3": k3}
