"""Samples to micro-batches, and micro-batches to the tensors of one forward pass.

In: lengths of samples and a budget of tokens. Out: micro-batches, each a list of rows, each a list of sample indices;
then, of each micro-batch, a `Batch`. The design decision: a row holds several samples one after another, so little is
padding, and it is short, since attention computes the square of a row. transformers keeps the samples of a row apart by
their position ids, which restart, where it is given no attention mask. Only the hidden states (or values) that predict
response tokens are picked, by flat index, so the head runs on N positions instead of R * L, and results go back to
[B, T] by the mask:

    batch = lay_out([[(prompt_ids, response_ids), ...], ...], device)
    hidden_RLH = model.model(batch.input_ids_RL, position_ids=batch.position_ids_RL).last_hidden_state
    logprobs_N = log_softmax(head(batch.select(hidden_RLH))) at batch.targets_N   # in chunks of N
    logprobs_BT = batch.unpack(logprobs_N)

Worked example, samples "a b | c d", "e | f" and "g | h i" (prompt | response), where P is the length of the prompt:

    lay_out([[0, 1], [2]]), R = 2, L = 6
    input_ids_RL     a b c d e f
                     g h i . . .
    position_ids_RL  0 1 2 3 0 1
                     0 1 2 0 0 0
    select_N         1 2 4 6 7   (b c e g h, flat: the token at P - 1 + t predicts response token t)
    targets_N        c d f h i
    response_mask_BT 1 1
                     1 0
                     1 1

Shapes: B samples, R rows of L tokens, T response tokens of the longest response, N response tokens of all samples.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | np.ndarray
Sample = tuple[Ids, Ids]  # prompt ids and response ids


def micro_batches(lengths: Sequence[int], token_budget: int, row_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of rows of sample indices, each of at most `token_budget` tokens with its padding.

    Samples are taken longest first, so that memory which does not suffice fails at once, and join the fullest row that
    has room (best-fit decreasing). A sample above the budget is alone.

    Args:
        row_tokens: how long rows may be, where the longest sample is not longer; 0: each sample has a row of its own.

    Lengths 3, 5, 4, 2, budget 14 and rows of 7: 5 opens the first, 4 the second, 3 joins the 4, 2 the 5:
    [[[1, 3], [2, 0]]]. With budget 7 these are two micro-batches of one row. With row_tokens 0 and budget 14: 5, 4 and
    then 3, 2, since 3 rows of 5 are too much: [[[1], [2]], [[0], [3]]].
    Raises ValueError if token_budget is below 1.
    """
    if token_budget < 1:
        raise ValueError(f"a micro-batch holds at least 1 token, got token_budget={token_budget}")
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    while left:
        width = max(lengths[left[0]], min(row_tokens, token_budget))
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, row), sorted
        later = []
        for i in left:
            at = bisect_left(room, (lengths[i], 0))
            if row_tokens and at < len(room):
                free, row = room.pop(at)
                rows[row].append(i)
            elif (len(rows) + 1) * width <= token_budget or not rows:
                free, row = width, len(rows)
                rows.append([i])
            else:
                later.append(i)
                continue
            insort(room, (free - lengths[i], row))
        batches.append(rows)
        left = later
    return batches


@dataclass(frozen=True)
class Batch:
    """The tensors of one forward pass; see the example at the top. All int64 and on one device but where stated."""

    input_ids_RL: Tensor
    position_ids_RL: Tensor  # place of the token in its own sample, from 0; 0 at padding, which so attends to itself
    response_mask_BT: Tensor  # bool
    select_N: Tensor  # flat index in [R * L] of the token that predicts each response token
    targets_N: Tensor  # the response tokens, sample after sample
    n_tokens: int  # real tokens, prompts and responses

    def select(self, outputs_RLX: Tensor) -> Tensor:
        """Of the model's outputs [R, L, ...], those that predict response tokens, [N, ...]."""
        return outputs_RLX.flatten(0, 1)[self.select_N]

    def unpack(self, values_N: Tensor) -> Tensor:
        """Values of response tokens as [B, T], 0 where a response has ended; gradients flow back."""
        return values_N.new_zeros(self.response_mask_BT.shape).masked_scatter(self.response_mask_BT, values_N)


def lay_out(rows: Sequence[Sequence[Sample]], device: torch.device | str = "cpu") -> Batch:
    """The samples of each row one after another, padded on the right to the longest row.

    An empty response is allowed. An empty prompt is a ValueError, since nothing would predict the response's first
    token.
    """
    samples = [sample for row in rows for sample in row]
    prompts_B = torch.tensor([len(prompt) for prompt, _ in samples])
    responses_B = torch.tensor([len(response) for _, response in samples])
    if not prompts_B.all():
        raise ValueError(f"sample {int(prompts_B.argmin())} has an empty prompt, so nothing predicts the response")
    lengths_B = prompts_B + responses_B
    ends = [np.cumsum([len(prompt) + len(response) for prompt, response in row]) for row in rows]
    width = int(max(end[-1] for end in ends))
    starts_B = torch.cat([r * width + torch.from_numpy(end) for r, end in enumerate(ends)]) - lengths_B
    places = _ranges(starts_B, lengths_B)
    input_ids_RL, position_ids_RL = torch.zeros(2, len(rows), width, dtype=torch.int64)
    tokens = np.concatenate([np.asarray(ids, np.int64) for sample in samples for ids in sample])
    input_ids_RL.view(-1)[places] = torch.from_numpy(tokens)
    position_ids_RL.view(-1)[places] = _ranges(torch.zeros_like(lengths_B), lengths_B)
    select_N = _ranges(starts_B + prompts_B - 1, responses_B)
    return Batch(
        input_ids_RL=input_ids_RL.to(device),
        position_ids_RL=position_ids_RL.to(device),
        response_mask_BT=(torch.arange(int(responses_B.max())) < responses_B[:, None]).to(device),
        select_N=select_N.to(device),
        targets_N=input_ids_RL.view(-1)[select_N + 1].to(device),
        n_tokens=int(lengths_B.sum()),
    )


def pad_tokens(rows: Sequence[Ids], batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """A column with one value a response token (log-probs of the engine, old values) as [B, T] of `batch`, 0 padded."""
    assert [len(row) for row in rows] == batch.response_mask_BT.sum(1).tolist(), "one value per response token"
    values_N = torch.from_numpy(np.concatenate([np.asarray(row) for row in rows]))
    return batch.unpack(values_N.to(batch.response_mask_BT.device, dtype))


def _ranges(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The ranges [start, start + length) one after another. Starts 5, 0 and lengths 2, 3: 5, 6, 0, 1, 2."""
    offsets_B = starts_B - (lengths_B.cumsum(0) - lengths_B)
    return torch.arange(int(lengths_B.sum())) + offsets_B.repeat_interleave(lengths_B)
