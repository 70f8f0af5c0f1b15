"""Samples to micro-batches, and micro-batches to the tensors of one forward pass.

In: samples and a budget of tokens. Out: micro-batches, each a list of rows, each a list of sample indices; then, of
each micro-batch, a `Batch`. The design decision: a row holds several samples one after another, so little is padding,
and it is short, since attention computes the square of a row. transformers keeps the samples of a row apart by their
position ids, which restart, where it is given no attention mask. With one, samples of a prompt share it: the row holds
it once, and the mask shows each response its prompt and itself. Only the hidden states (or values) that predict
response tokens are picked, by flat index, so the head runs on N positions instead of R * L, and results go back to
[B, T] by the mask:

    batch = lay_out([[(prompt_ids, response_ids), ...], ...], device)
    hidden_RLH = model.model(batch.input_ids_RL, batch.attention_mask, batch.position_ids_RL).last_hidden_state
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

With shared prompts, "a b | c d" and "a b | e" in one row:

    input_ids_RL     a b c d e
    position_ids_RL  0 1 2 3 2
    select_N         1 2 1       (b c b)
    attention_mask   e sees a, b and e

Shapes: B samples, R rows of L tokens, T response tokens of the longest response, N response tokens of all samples, K
pieces: prompts and responses.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | np.ndarray
Sample = tuple[Ids, Ids]  # prompt ids and response ids


class Layout(NamedTuple):
    """How samples are laid out for a model.

    row_tokens: how long rows may be, where the longest sample is not longer; 0: each sample has a row of its own.
    shares_prompts: whether samples of one prompt are laid out with the prompt once.
    """

    row_tokens: int
    shares_prompts: bool


def split(samples: Sequence[Sample], token_budget: int, layout: Layout) -> list[list[list[int]]]:
    """Micro-batches of rows of sample indices (see `micro_batches`); what is to share a prompt stands together."""
    bundles = [[i] for i in range(len(samples))]
    if layout.shares_prompts:
        longest = max((len(prompt) + len(response) for prompt, response in samples), default=0)
        bundles = bundle(samples, min(max(layout.row_tokens, longest), token_budget))
    lengths = [len(samples[members[0]][0]) + sum(len(samples[i][1]) for i in members) for members in bundles]
    return [
        [[i for member in row for i in bundles[member]] for row in batch]
        for batch in micro_batches(lengths, token_budget, layout.row_tokens)
    ]


def bundle(samples: Sequence[Sample], most: int) -> list[list[int]]:
    """Indices of samples with the same prompt, together at most `most` tokens long with the prompt once."""
    bundles: list[list[int]] = []
    newest: dict[bytes, tuple[list[int], int]] = {}  # of each prompt: its last bundle, and the room in it
    for i, (prompt, response) in enumerate(samples):
        key = np.asarray(prompt, np.int64).tobytes()
        members, room = newest.get(key, ([], 0))
        if len(response) > room or not members:
            members, room = [], most - len(prompt)
            bundles.append(members)
        members.append(i)
        newest[key] = members, room - len(response)
    return bundles


def micro_batches(lengths: Sequence[int], token_budget: int, row_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of rows of sample indices, each of at most `token_budget` tokens with its padding.

    Samples are taken longest first, so that memory which does not suffice fails at once, and join the fullest row that
    has room (best-fit decreasing). A sample above the budget is alone.

    Args:
        row_tokens: as of `Layout`.

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
    n_tokens: int  # real tokens, of prompts and responses
    attention_mask: Tensor | None = None  # bool [R, 1, L, L]: which tokens (last axis) a token sees; None: by position

    def select(self, outputs_RLX: Tensor) -> Tensor:
        """Of the model's outputs [R, L, ...], those that predict response tokens, [N, ...]."""
        return outputs_RLX.flatten(0, 1)[self.select_N]

    def unpack(self, values_N: Tensor) -> Tensor:
        """Values of response tokens as [B, T], 0 where a response has ended; gradients flow back."""
        return values_N.new_zeros(self.response_mask_BT.shape).masked_scatter(self.response_mask_BT, values_N)


def lay_out(
    rows: Sequence[Sequence[Sample]], device: torch.device | str = "cpu", shares_prompts: bool = False
) -> Batch:
    """The samples of each row one after another, padded on the right to the longest row.

    An empty response is allowed. An empty prompt is a ValueError, since nothing would predict the response's first
    token.

    Args:
        shares_prompts: whether neighbours in a row with the same prompt have it once.
    """
    pieces = _pieces(rows, shares_prompts)
    row_K, position_K, prompt_K, response_K = torch.tensor([piece[1:] for piece in pieces]).T
    lengths_K = torch.tensor([len(piece.ids) for piece in pieces])
    totals_R = torch.zeros(len(rows), dtype=torch.int64).index_add(0, row_K, lengths_K)
    width = int(totals_R.max())
    starts_K = row_K * width + lengths_K.cumsum(0) - lengths_K - (totals_R.cumsum(0) - totals_R)[row_K]
    places = _ranges(starts_K, lengths_K)

    def in_rows(values: Tensor, padding: int) -> Tensor:
        full = torch.full((len(rows), width), padding)
        full.view(-1)[places] = values
        return full

    input_ids_RL = in_rows(torch.from_numpy(np.concatenate([np.asarray(p.ids, np.int64) for p in pieces])), 0)
    # A response's first token is predicted by the last one of its prompt, each other by the one before it.
    is_response_K = response_K >= 0
    responses_B = lengths_K[is_response_K]
    targets_at_N = _ranges(starts_K[is_response_K], responses_B)
    select_N = targets_at_N - 1
    prompt_ends_B = torch.zeros(len(responses_B), dtype=torch.int64)
    prompt_ends_B[prompt_K[~is_response_K]] = (starts_K + lengths_K - 1)[~is_response_K]
    firsts_B = responses_B.cumsum(0) - responses_B
    some_B = responses_B > 0
    select_N[firsts_B[some_B]] = prompt_ends_B[prompt_K[is_response_K]][some_B]
    mask = None
    if len(pieces) < 2 * len(responses_B):
        prompt_RL, response_RL = (in_rows(of_K.repeat_interleave(lengths_K), -1) for of_K in (prompt_K, response_K))
        mask = _sees(prompt_RL.to(device), response_RL.to(device))  # L times as large as what it is made of
    return Batch(
        input_ids_RL=input_ids_RL.to(device),
        position_ids_RL=in_rows(_ranges(position_K, lengths_K), 0).to(device),
        response_mask_BT=(torch.arange(int(responses_B.max())) < responses_B[:, None]).to(device),
        select_N=select_N.to(device),
        targets_N=input_ids_RL.view(-1)[targets_at_N].to(device),
        n_tokens=int(lengths_K.sum()),
        attention_mask=mask,
    )


class _Piece(NamedTuple):
    """A prompt or a response in a row, of which a batch has K.

    row: where it is. position: of its first token. prompt: the sample that brings it, or brings the response's prompt.
    response: the sample whose response it is; -1: a prompt.
    """

    ids: Ids
    row: int
    position: int
    prompt: int
    response: int


def _pieces(rows: Sequence[Sequence[Sample]], shares_prompts: bool) -> list[_Piece]:
    pieces: list[_Piece] = []
    sample = owner = 0
    for r, row in enumerate(rows):
        before: Ids | None = None
        for prompt, response in row:
            if not len(prompt):
                raise ValueError(f"sample {sample} has an empty prompt, so nothing predicts the response")
            if not (shares_prompts and before is not None and np.array_equal(before, prompt)):
                owner = sample
                pieces.append(_Piece(prompt, r, 0, owner, -1))
            pieces.append(_Piece(response, r, len(prompt), owner, sample))
            before, sample = prompt, sample + 1
    return pieces


def _sees(prompt_RL: Tensor, response_RL: Tensor) -> Tensor:
    """Whether a token sees another, [R, 1, L, L]: one not after it, of the same prompt, and if of a response then of
    the same. -1 stands for no prompt (padding sees the padding before it) and no response."""
    width = prompt_RL.shape[1]
    same_prompt = prompt_RL[:, :, None] == prompt_RL[:, None, :]
    shown = (response_RL[:, None, :] == -1) | (response_RL[:, :, None] == response_RL[:, None, :])
    not_after = torch.ones(width, width, dtype=torch.bool, device=prompt_RL.device).tril()
    return (same_prompt & shown & not_after)[:, None]


def pad_tokens(rows: Sequence[Ids], batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """A column with one value a response token (log-probs of the engine, old values) as [B, T] of `batch`, 0 padded."""
    assert [len(row) for row in rows] == batch.response_mask_BT.sum(1).tolist(), "one value per response token"
    values_N = torch.from_numpy(np.concatenate([np.asarray(row) for row in rows]))
    return batch.unpack(values_N.to(batch.response_mask_BT.device, dtype))


def _ranges(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The ranges [start, start + length) one after another. Starts 5, 0 and lengths 2, 3: 5, 6, 0, 1, 2."""
    offsets_B = starts_B - (lengths_B.cumsum(0) - lengths_B)
    return torch.arange(int(lengths_B.sum())) + offsets_B.repeat_interleave(lengths_B)
