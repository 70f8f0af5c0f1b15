"""Log-probs and entropies from logits against autograd's own way."""

import pytest
import torch

from raypipe import token_logprobs as module
from raypipe.token_logprobs import token_logprobs


def plain(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    all_NV = (logits_NV.float() / temperature).log_softmax(-1)
    return all_NV.gather(1, targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(-1)


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [1, 11 * 3, 2**22])  # rows of a block: 1, 3, all
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradient_are_those_of_autograd(logits, block, temperature, dtype, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    targets, weights = torch.arange(7), torch.linspace(-1, 1, 7)
    found, wanted = (logits.to(dtype).requires_grad_() for _ in range(2))
    logprobs, entropy = token_logprobs(found, targets, temperature)
    right, right_entropy = plain(wanted, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    assert torch.allclose(logprobs, right, atol=1e-5) and torch.allclose(entropy, right_entropy, atol=1e-5)
    (logprobs * weights).sum().backward()
    (right * weights).sum().backward()
    assert found.grad.dtype == dtype
    assert torch.allclose(found.grad.float(), wanted.grad.float(), atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_the_gradient_equals_finite_differences(logits):
    logits = logits.double().requires_grad_()
    torch.autograd.gradcheck(lambda x: token_logprobs(x, torch.arange(7), 0.7)[0], logits)


def test_certain_and_extreme_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 2]), 1.0)
    assert logprobs.tolist() == pytest.approx([0.0, -1.0986123]) and entropy.tolist() == pytest.approx([0.0, 1.0986123])
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[0].abs().max() == 0


def test_no_rows_give_no_values():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)
