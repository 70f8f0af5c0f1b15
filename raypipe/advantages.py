"""Advantage estimators: how much better a sample, or a token, was than expected.

In: scores of samples with the ids of their groups, or rewards and values of tokens. Out: advantages (and returns) of
the same shape; nothing here needs a gradient. The design decision: two families, not one wide signature. Group
estimators map `(scores_B, group_ids_B, valid_B)` to `advantages_B` and share the dict `ESTIMATORS`; `gae` and
`reinforce_pp` work on tokens and are called by name. Whitening is a step of its own, since it alone needs the whole
batch: `moments` of its parts are merged by `merge_moments`, so ranks exchange three numbers each.

Shapes: B samples, T response tokens, K parts of a batch. Masks are bool, True at response tokens that count; what
stands outside a mask (padding, NaN) is never read, and results are 0 there.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def group_statistics(scores_B: Tensor, group_ids_B: Tensor, valid_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The valid scores of every sample's group: `(centered_B, sum_of_squares_B, count_B)`, in float64.

    Args:
        scores_B: scores; anything, also NaN, where not valid.
        group_ids_B: int64, equal for samples of one prompt, otherwise arbitrary and in any order.
        valid_B: bool, False for samples without a score (failed generation or grading): no part of any statistic.

    Returns:
        centered_B: score minus the group's mean, 0 where not valid. sum_of_squares_B: of the group's centered scores.
        count_B: the group's valid samples.

    Scores 1, 0, 0, 0 of one group: centered 0.75, -0.25, -0.25, -0.25; sum of squares 0.75; count 4.
    """
    groups, index_B = group_ids_B.unique(return_inverse=True)

    def group_sum(values_B: Tensor) -> Tensor:
        return values_B.new_zeros(len(groups)).index_add(0, index_B, values_B)[index_B]

    # Scores relative to the group's lowest: the same advantages, exactly 0 when all are equal, and no cancellation when
    # scores are large and differ little.
    scores_B = scores_B.double().masked_fill(~valid_B, torch.inf)
    lowest_B = scores_B.new_full((len(groups),), torch.inf).scatter_reduce(0, index_B, scores_B, "amin")[index_B]
    above_B = torch.where(valid_B, scores_B - lowest_B, 0.0)
    count_B = group_sum(valid_B.double())
    centered_B = torch.where(valid_B, above_B - group_sum(above_B) / count_B, 0.0)
    return centered_B, group_sum(centered_B.square()), count_B


def grpo(scores_B: Tensor, group_ids_B: Tensor, valid_B: Tensor) -> Tensor:
    """Group-relative advantage `(score - mean) / (std + 1e-6)`, std unbiased (GRPO, arXiv 2402.03300, section 4.1.2).

    A group with one valid sample has no baseline and so no signal: 0. A sample that is not valid: 0.
    Scores 6, 3: mean 4.5, std sqrt((1.5^2 + 1.5^2) / 1) = 2.1213, advantages 0.7071, -0.7071.
    """
    centered_B, sum_of_squares_B, count_B = group_statistics(scores_B, group_ids_B, valid_B)
    std_B = (sum_of_squares_B / (count_B - 1).clamp(min=1)).sqrt()
    return (centered_B / (std_B + 1e-6)).to(scores_B.dtype)


def dr_grpo(scores_B: Tensor, group_ids_B: Tensor, valid_B: Tensor) -> Tensor:
    """`score - mean` of the group (Dr.GRPO, arXiv 2503.20783): a std would favour too easy and too hard prompts.

    Scores 6, 3: 1.5, -1.5. One valid sample in the group, or a sample that is not valid: 0.
    """
    return group_statistics(scores_B, group_ids_B, valid_B)[0].to(scores_B.dtype)


def rloo(scores_B: Tensor, group_ids_B: Tensor, valid_B: Tensor) -> Tensor:
    """`score - mean of the group's other scores`, leave-one-out (RLOO, arXiv 2402.14740).

    Equals the centered score times n / (n - 1). Scores 6, 3: 3, -3. One valid sample in the group, or not valid: 0.
    """
    centered_B, _, count_B = group_statistics(scores_B, group_ids_B, valid_B)
    return (centered_B * count_B / (count_B - 1).clamp(min=1)).to(scores_B.dtype)


def reinforce_pp_baseline(scores_B: Tensor, group_ids_B: Tensor, valid_B: Tensor) -> Tensor:
    """The first half of REINFORCE++-baseline (arXiv 2501.03262): `score - mean` of the group, as `dr_grpo`.

    The second half is its definition too: spread over the response tokens, then `whiten` over all tokens of the batch.
    """
    return dr_grpo(scores_B, group_ids_B, valid_B)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def token_rewards(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, kl_coef: float) -> Tensor:
    """Rewards of tokens, [B, T]: the score at the last token of the mask, less `kl_coef` times the KL at each token.

    Source: InstructGPT (arXiv 2203.02155, equation 2). Score 1, KL 0.1, 0.2, 0 with mask 1, 1, 0 and coefficient 0.5:
    -0.05, 0.9, 0.
    """
    tokens_left_BT = mask_BT.flip(1).cumsum(1).flip(1)
    last_BT = mask_BT & (tokens_left_BT == 1)
    return torch.where(last_BT, scores_B[:, None], 0.0) - kl_coef * torch.where(mask_BT, kl_BT, 0.0)


def gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16): `(advantages_BT, returns_BT)`, 0 off the mask.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next; return = A + V. "Next" is the next
    token of the mask: tokens outside (padding, or a tool's output in the middle) are skipped with their reward, and the
    value and advantage behind them are carried across. After the last token both are 0.

    Rewards 1, 2, 3, values 0.5, 1, 1.5, mask 1, 0, 1, gamma = lam = 1:
        t = 2: delta = 3 - 1.5 = 1.5, A = 1.5;  t = 0: delta = 1 + 1.5 - 0.5 = 2, A = 2 + 1.5 = 3.5.
    """
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        delta_B = token_rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = torch.where(mask_BT[:, t], delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = next_advantage_B
    zero = advantages_BT.new_zeros(())
    return torch.where(mask_BT, advantages_BT, zero), torch.where(mask_BT, advantages_BT + values_BT, zero)


def reinforce_pp(token_rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Discounted return to go of every token of the mask, [B, T] (REINFORCE++, arXiv 2501.03262); `whiten` comes next.

    Tokens outside the mask are skipped without a discount. Rewards 0, 0, 0, 0, 2, mask 1, 1, 0, 0, 1, gamma 0.5:
    0.5, 1, 0, 0, 2.
    """
    return gae(token_rewards_BT, torch.zeros_like(token_rewards_BT), mask_BT, gamma, lam=1.0)[0]


def moments(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`[count, mean, sum of squared deviations]` over the mask, float64: what parts of a batch exchange to be whitened.

    Values 1, 2, 6 with mask 1, 1, 0: [2, 1.5, 0.5].
    """
    values_BT = torch.where(mask_BT, values_BT.double(), 0.0)
    count = mask_BT.sum().double()
    mean = values_BT.sum() / count.clamp(min=1)
    return torch.stack([count, mean, torch.where(mask_BT, values_BT - mean, 0.0).square().sum()])


def merge_moments(moments_K3: Tensor) -> Tensor:
    """The moments of a whole from those of its K parts; exact where sums of squares would cancel (Chan et al., 1979).

    [2, 1.5, 0.5] (1 and 2) with [1, 6, 0]: mean 9 / 3 = 3, deviations 0.5 + 2 * 1.5^2 + 1 * 3^2 = 14: [3, 3, 14].
    """
    count_K, mean_K, deviation_K = moments_K3.unbind(1)
    count = count_K.sum()
    mean = (count_K * mean_K).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (deviation_K + count_K * (mean_K - mean).square()).sum()])


def whiten(values_BT: Tensor, mask_BT: Tensor, moments_3: Tensor | None = None) -> Tensor:
    """`(value - mean) / sqrt(unbiased variance + 1e-8)` over the mask, 0 outside.

    Args:
        moments_3: merged moments of the whole batch, where `values_BT` is only a part of it.

    Values 1, 2, 6, mask 1, 1, 0: mean 1.5, variance 0.5: -0.7071, 0.7071, 0. A single token: 0.
    """
    count, mean, deviation = moments(values_BT, mask_BT) if moments_3 is None else moments_3
    variance = deviation / (count - 1).clamp(min=1)
    whitened_BT = (values_BT.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask_BT, whitened_BT, 0.0).to(values_BT.dtype)


def explained_variance(error_moments_3: Tensor, return_moments_3: Tensor) -> float:
    """`1 - Var(returns - values) / Var(returns)`: 1 for a perfect critic, 0 for a constant, NaN if returns are equal.

    Both from `moments`, of `returns_BT - values_BT` and of `returns_BT`. Returns 1, 3, values 2, 3: 1 - 0.5 / 2 = 0.75.
    """
    return float(1 - error_moments_3[2] / return_moments_3[2]) if return_moments_3[2] > 0 else float("nan")


def adaptive_kl(coef: float, kl: float, *, target: float, horizon: float, n_steps: float) -> float:
    """The next KL coefficient: `coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon)`.

    Source: Ziegler et al. (arXiv 1909.08593, section 2.2). `n_steps` are the samples since the last update; over
    `horizon` samples the coefficient changes by a factor of e^0.2 at most.
    Raises ValueError if target or horizon is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive KL needs a target and a horizon above 0, got target={target}, horizon={horizon}")
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n_steps / horizon)


def overlong_penalty(lengths_B: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft punishment of long responses, to add to the score, [B] (DAPO, arXiv 2503.14476, equation 13).

    0 up to `max_length - buffer` tokens, falling linearly to `-factor` at `max_length`, `-factor` beyond. With
    max_length 100, buffer 20, factor 1: 80 tokens 0, 90 tokens -0.5, 130 tokens -1.
    Raises ValueError if the buffer is not within 1..max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer must be 1 to max_length={max_length} tokens, got {buffer}")
    return factor * ((max_length - buffer - lengths_B) / buffer).clamp(-1.0, 0.0)
