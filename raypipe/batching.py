"""Samples to micro-batches, and micro-batches to the tensors of one forward pass.

In: lengths of samples and a budget of tokens. Out: lists of sample indices; then, of each list, a `Batch`. The design
decision: padded and packed batches differ only in where a sample's tokens lie in `input_ids_RL`. Everything behind the
model is the same: the hidden states (or values) that predict response tokens are picked by flat index, so the head runs
on N positions instead of R * L, and results go back to [B, T] by the mask:

    batch = pack_batch([(prompt_ids, response_ids), ...], device=device)       # or pad_batch(..., pad_id)
    hidden_RLH = model.model(batch.input_ids_RL, position_ids=batch.position_ids_RL).last_hidden_state
    logprobs_N = log_softmax(head(batch.select(hidden_RLH))) at batch.targets_N   # in chunks of N
    logprobs_BT = batch.unpack(logprobs_N)

Worked example, samples "a b | c d" and "e | f" (prompt | response), where P is the length of the prompt:

    pad_batch, R = 2, L = 4                       pack_batch, R = 1, L = 6
    input_ids_RL     a b c d                      a b c d e f
                     e f . .
    position_ids_RL  0 1 2 3                      0 1 2 3 0 1
                     0 1 0 0
    document_ids_RL  0 0 0 0                      0 0 0 0 1 1
                     1 1 -1 -1
    select_N         1 2 4   (b c e, flat)        1 2 4   (the token at P - 1 + t predicts response token t)
    targets_N        c d f                        c d f
    response_mask_BT 1 1                          1 1
                     1 0                          1 0

Shapes: B samples, R rows of L tokens, T response tokens of the longest response, N response tokens of all samples.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | np.ndarray


def micro_batches(lengths: Sequence[int], token_budget: int, max_samples: int | None = None) -> list[list[int]]:
    """Indices of samples for `pack_batch`: the tokens of a micro-batch sum to at most `token_budget`.

    Best-fit decreasing, in O(n log n): each sample, longest first, joins the fullest micro-batch that has room; one
    above the budget is alone. The longest samples come first, so that memory which does not suffice fails at once.

    Lengths 3, 5, 4, 2 and budget 7: 5 opens the first, 4 the second, 3 joins the 4, 2 the 5: [[1, 3], [2, 0]].
    Raises ValueError if token_budget or max_samples is below 1.
    """
    _check(token_budget, max_samples)
    batches: list[list[int]] = []
    open_batches: list[tuple[int, int]] = []  # (tokens left, index in batches), sorted
    for i in _longest_first(lengths):
        at = bisect_left(open_batches, (lengths[i], 0))
        if at < len(open_batches):
            left, b = open_batches.pop(at)
            batches[b].append(i)
        else:
            left, b = token_budget, len(batches)
            batches.append([i])
        if left > lengths[i] and len(batches[b]) != max_samples:
            insort(open_batches, (left - lengths[i], b))
    return batches


def padded_micro_batches(
    lengths: Sequence[int], token_budget: int, max_samples: int | None = None, max_padding: float = 0.05
) -> list[list[int]]:
    """Indices of samples for `pad_batch`: samples times the longest of them is at most `token_budget`.

    Samples go in order of length, longest first, and a micro-batch ends where its share of padding would pass
    `max_padding`: a small one costs less than a large one that is half padding. A sample above the budget is alone.

    Lengths 3, 5, 4, 2, budget 8 and max_padding 0.2: 5 alone, since 2 * 5 > 8; 4 and 3, 1 of 8 padded; 2:
    [[1], [2, 0], [3]].
    Raises ValueError if token_budget or max_samples is below 1.
    """
    _check(token_budget, max_samples)
    batches: list[list[int]] = []
    n_tokens = 0  # of the last micro-batch
    for i in _longest_first(lengths):
        size = (len(batches[-1]) + 1) * lengths[batches[-1][0]] if batches else 0
        fits = batches and size <= token_budget and n_tokens + lengths[i] >= size * (1 - max_padding)
        if fits and len(batches[-1]) != max_samples:
            batches[-1].append(i)
            n_tokens += lengths[i]
        else:
            batches.append([i])
            n_tokens = lengths[i]
    return batches


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _check(token_budget: int, max_samples: int | None) -> None:
    if token_budget < 1 or (max_samples is not None and max_samples < 1):
        raise ValueError(
            f"a micro-batch holds at least 1 token and 1 sample, got token_budget={token_budget}, "
            f"max_samples={max_samples}"
        )


@dataclass(frozen=True)
class Batch:
    """The tensors of one forward pass; see the example at the top. All int64 and on one device but where stated."""

    input_ids_RL: Tensor
    position_ids_RL: Tensor  # place of the token in its own sample, from 0; 0 at padding
    document_ids_RL: Tensor  # index of the token's sample, -1 at padding: tokens attend within one document only
    cu_seqlens: Tensor  # int32 [B + 1], where samples begin in the row of real tokens, as varlen attention wants it
    response_mask_BT: Tensor  # bool
    select_N: Tensor  # flat index in [R * L] of the token that predicts each response token
    targets_N: Tensor  # the response tokens, sample after sample
    n_tokens: int  # real tokens, prompts and responses

    @property
    def attention_mask_RL(self) -> Tensor:
        """True at real tokens. For padded batches; transformers wants None for packed ones (and `use_cache=False`),
        where it finds the documents by the position ids that restart."""
        return self.document_ids_RL >= 0

    @property
    def padding_fraction(self) -> float:
        """Share of the forward pass that is spent on padding. Over several: 1 - sum of n_tokens / sum of R * L."""
        return 1 - self.n_tokens / self.input_ids_RL.numel()

    def select(self, outputs_RLX: Tensor) -> Tensor:
        """Of the model's outputs [R, L, ...], those that predict response tokens, [N, ...]."""
        return outputs_RLX.flatten(0, 1)[self.select_N]

    def unpack(self, values_N: Tensor) -> Tensor:
        """Values of response tokens as [B, T], 0 where a response has ended; gradients flow back."""
        return values_N.new_zeros(self.response_mask_BT.shape).masked_scatter(self.response_mask_BT, values_N)


def pad_batch(rows: Sequence[tuple[Ids, Ids]], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """One sample `(prompt_ids, response_ids)` a row, padded on the right to the longest.

    An empty response is allowed: the row `([pad_id], [])` lets a rank without samples take part in a step, with a loss
    and a gradient of 0. An empty prompt is a ValueError, since nothing would predict the response's first token.
    """
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    starts_B = torch.arange(len(rows)) * max(lengths)
    return _lay_out(rows, starts_B, torch.full((len(rows), max(lengths)), pad_id), device)


def pack_batch(rows: Sequence[tuple[Ids, Ids]], device: torch.device | str = "cpu") -> Batch:
    """All samples `(prompt_ids, response_ids)` one after another in one row, without padding; else as `pad_batch`."""
    lengths_B = torch.tensor([len(prompt) + len(response) for prompt, response in rows])
    starts_B = lengths_B.cumsum(0) - lengths_B
    return _lay_out(rows, starts_B, torch.zeros(1, int(lengths_B.sum()), dtype=torch.int64), device)


def pad_tokens(rows: Sequence[Ids], batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """A column with one value a response token (log-probs of the engine, old values) as [B, T] of `batch`, 0 padded."""
    assert [len(row) for row in rows] == batch.response_mask_BT.sum(1).tolist(), "one value per response token"
    values_N = torch.from_numpy(np.concatenate([np.asarray(row) for row in rows]))
    return batch.unpack(values_N.to(batch.response_mask_BT.device, dtype))


def _lay_out(
    rows: Sequence[tuple[Ids, Ids]], starts_B: Tensor, input_ids_RL: Tensor, device: torch.device | str
) -> Batch:
    """Writes sample b at flat position `starts_B[b]` of `input_ids_RL`."""
    prompts_B = torch.tensor([len(prompt) for prompt, _ in rows])
    responses_B = torch.tensor([len(response) for _, response in rows])
    if not prompts_B.all():
        raise ValueError(f"row {int(prompts_B.argmin())} has an empty prompt, so nothing predicts the response")
    lengths_B = prompts_B + responses_B
    places = _ranges(starts_B, lengths_B)
    tokens = torch.from_numpy(np.concatenate([np.asarray(ids, np.int64) for row in rows for ids in row]))
    position_ids_RL, document_ids_RL = torch.zeros_like(input_ids_RL), torch.full_like(input_ids_RL, -1)
    input_ids_RL.view(-1)[places] = tokens
    position_ids_RL.view(-1)[places] = _ranges(torch.zeros_like(lengths_B), lengths_B)
    document_ids_RL.view(-1)[places] = torch.arange(len(rows)).repeat_interleave(lengths_B)
    select_N = _ranges(starts_B + prompts_B - 1, responses_B)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths_B.cumsum(0).int()])
    return Batch(
        input_ids_RL=input_ids_RL.to(device),
        position_ids_RL=position_ids_RL.to(device),
        document_ids_RL=document_ids_RL.to(device),
        cu_seqlens=cu_seqlens.to(device),
        response_mask_BT=(torch.arange(int(responses_B.max())) < responses_B[:, None]).to(device),
        select_N=select_N.to(device),
        targets_N=input_ids_RL.view(-1)[select_N + 1].to(device),
        n_tokens=int(lengths_B.sum()),
    )


def _ranges(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The ranges [start, start + length) one after another. Starts 5, 0 and lengths 2, 3: 5, 6, 0, 1, 2."""
    offsets_B = starts_B - (lengths_B.cumsum(0) - lengths_B)
    return torch.arange(int(lengths_B.sum())) + offsets_B.repeat_interleave(lengths_B)
