"""Log-probs of given tokens, and entropies, from the logits of a large vocabulary.

In: logits [N, V] as the head gives them. Out: float32 [N] each; the entropy is a figure to look at, without a gradient.
The design decision: autograd would write about ten tensors of the logits' size, and keep some in float32. Here the
logits are kept as they are, backward computes their softmax again, and both work on blocks of rows, on CPU such that
the allocator uses the same memory for each. The gradient of log p(y) is (1[v = y] - p(v)) / temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of a block on CPU: 16 MiB in float32. glibc takes fresh memory from the system for each tensor above 32.
BLOCK = 2**22


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets_N` under softmax(logits / temperature), and the entropies of these distributions in nats,
    [N] in float32 (float64 of float64)."""
    logprobs_N, entropy_N = _TokenLogprobs.apply(logits_NV, targets_N, temperature)
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        totals, chosen, entropies = [], [], []
        for rows, scaled_BV in _blocks(logits_NV, temperature):
            total_B = scaled_BV.logsumexp(-1)
            probs_BV = (scaled_BV - total_B[:, None]).exp_()
            entropies.append(total_B - probs_BV.mul_(scaled_BV).sum(-1))
            chosen.append(scaled_BV.gather(1, targets_N[rows, None])[:, 0])
            totals.append(total_B)
        total_N, entropy_N = torch.cat(totals), torch.cat(entropies)
        ctx.save_for_backward(logits_NV, targets_N, total_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(chosen) - total_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, total_N = ctx.saved_tensors
        slope_N1 = (grad_N / ctx.temperature)[:, None]
        grad_NV = torch.empty_like(logits_NV)
        for rows, scaled_BV in _blocks(logits_NV, ctx.temperature):
            probs_BV = (scaled_BV - total_N[rows, None]).exp_()
            grad_NV[rows] = probs_BV.mul_(-slope_N1[rows]).scatter_add_(1, targets_N[rows, None], slope_N1[rows])
        return grad_NV, None, None


def _blocks(logits_NV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, at least one, and their logits over the temperature."""
    count, vocabulary = logits_NV.shape
    step = max(1, BLOCK // vocabulary if logits_NV.device.type == "cpu" else count)
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    for start in range(0, max(1, count), step):
        rows = slice(start, start + step)
        block_BV = logits_NV[rows].to(dtype)
        yield rows, block_BV if temperature == 1 else block_BV / temperature
