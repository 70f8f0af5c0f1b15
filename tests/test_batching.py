"""Micro-batches within their budget, the layout of padded and packed batches, and both against a transformers model."""

import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raypipe.batching import micro_batches, pack_batch, pad_batch, pad_tokens, padded_micro_batches
from raypipe.losses import AGGREGATIONS, count, gspo, ppo_clip, token_weights

PLANNERS = [micro_batches, padded_micro_batches]


def cost(planner, lengths, indices):
    """Tokens that the forward pass of a micro-batch computes."""
    chosen = [lengths[i] for i in indices]
    return sum(chosen) if planner is micro_batches else len(chosen) * max(chosen)


def random_lengths(n, seed=0):
    """Long-tailed, as responses are."""
    rng = random.Random(seed)
    return [min(4096, 64 + int(rng.lognormvariate(5.5, 0.9))) for _ in range(n)]


def test_micro_batches_by_hand():
    # 5 opens the first, 4 the second; 3 fits beside the 4 exactly, 2 beside the 5.
    assert micro_batches([3, 5, 4, 2], 7) == [[1, 3], [2, 0]]
    # Best fit: 3 could join the 5 (8 of 9) or the 6 (9 of 9) and joins the fuller.
    assert micro_batches([5, 6, 3], 9) == [[1, 2], [0]]


def test_padded_micro_batches_by_hand():
    # 5 alone since 2 * 5 > 8; 4 and 3 in 2 * 4 = 8, of which 1 is padding; 2 is left.
    assert padded_micro_batches([3, 5, 4, 2], 8, max_padding=0.2) == [[1], [2, 0], [3]]
    # 1 of 8 is more than a tenth.
    assert padded_micro_batches([3, 5, 4, 2], 8, max_padding=0.1) == [[1], [2], [0], [3]]
    # 10, 9: 1 of 20 is padding; with another 9, 2 of 30; then 8 would make it 4 of 40, a tenth exactly; 7 too much.
    assert padded_micro_batches([10, 9, 9, 8, 7], 1000, max_padding=0.1) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_sample_above_the_budget_is_alone(planner):
    assert planner([3, 20, 3, 11], 10) == [[1], [3], [0, 2]]
    assert planner([], 10) == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_equal_lengths_keep_their_order_and_max_samples_holds(planner):
    assert planner([2, 2, 2, 2, 2], 100, max_samples=2) == [[0, 1], [2, 3], [4]]
    assert planner([2, 2, 2], 100, max_samples=1) == [[0], [1], [2]]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("max_samples", [None, 3])
@pytest.mark.parametrize("budget", [100, 2048, 8192])
def test_every_sample_is_in_one_micro_batch_within_the_budget(planner, max_samples, budget):
    lengths = random_lengths(300)
    plan = planner(lengths, budget, max_samples)
    assert sorted(i for indices in plan for i in indices) == list(range(300))
    assert plan == planner(np.array(lengths), budget, max_samples)
    for indices in plan:
        assert cost(planner, lengths, indices) <= budget or len(indices) == 1
        assert max_samples is None or len(indices) <= max_samples


@pytest.mark.parametrize("n", [16, 64, 512])
@pytest.mark.parametrize("budget", [8192, 65536])
def test_packed_micro_batches_are_full_and_padded_ones_waste_at_most_a_twentieth(n, budget):
    lengths = random_lengths(n)
    least = -(-sum(lengths) // budget)
    assert len(micro_batches(lengths, budget)) <= least + 1
    for indices in padded_micro_batches(lengths, budget):
        tokens = sum(lengths[i] for i in indices)
        assert tokens >= 0.95 * cost(padded_micro_batches, lengths, indices) - 1e-9


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(("budget", "max_samples"), [(0, None), (-5, None), (10, 0)])
def test_impossible_budgets_are_refused(planner, budget, max_samples):
    with pytest.raises(ValueError, match=f"token_budget={budget}, max_samples={max_samples}"):
        planner([1], budget, max_samples)


# The example of the module docstring: prompts (1, 2) and (5), responses (3, 4) and (6).
EXAMPLE = [([1, 2], [3, 4]), ([5], [6])]


def test_pad_batch_by_hand():
    batch = pad_batch(EXAMPLE, pad_id=9)
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch.document_ids_RL.tolist() == [[0, 0, 0, 0], [1, 1, -1, -1]]
    assert batch.attention_mask_RL.tolist() == [[True, True, True, True], [True, True, False, False]]
    assert batch.response_mask_BT.tolist() == [[True, True], [True, False]]
    assert batch.select_N.tolist() == [1, 2, 4]
    assert batch.targets_N.tolist() == [3, 4, 6]
    assert batch.cu_seqlens.tolist() == [0, 4, 6] and batch.cu_seqlens.dtype == torch.int32
    assert batch.n_tokens == 6 and batch.padding_fraction == 0.25  # 2 of 8


def test_pack_batch_by_hand():
    batch = pack_batch(EXAMPLE)
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.document_ids_RL.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.response_mask_BT.tolist() == [[True, True], [True, False]]
    assert batch.select_N.tolist() == [1, 2, 4]
    assert batch.targets_N.tolist() == [3, 4, 6]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.n_tokens == 6 and batch.padding_fraction == 0


@pytest.mark.parametrize("batch", [pad_batch(EXAMPLE, 9), pack_batch(EXAMPLE)], ids=["padded", "packed"])
def test_select_takes_the_predecessor_of_each_response_token_and_unpack_puts_it_back(batch):
    # An "output" that is the token itself: the predecessors of 3, 4 and 6 are 2, 3 and 5.
    selected = batch.select(batch.input_ids_RL)
    assert selected.tolist() == [2, 3, 5]
    assert batch.unpack(selected).tolist() == [[2, 3], [5, 0]]
    values_N = torch.tensor([0.5, 1.5, 2.5], requires_grad=True)
    batch.unpack(values_N).mul(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert values_N.grad.tolist() == [1.0, 2.0, 3.0]


def test_pad_tokens_aligns_a_column_with_the_responses():
    batch = pad_batch([*EXAMPLE, ([7, 8], [])], 9)
    rows = [np.array([0.5, -1.5], np.float32), [2.0], []]
    assert pad_tokens(rows, batch).tolist() == [[0.5, -1.5], [2.0, 0.0], [0.0, 0.0]]
    with pytest.raises(AssertionError, match="one value per response token"):
        pad_tokens([[0.5], [2.0, 1.0], []], batch)  # the right total, the wrong rows


def test_an_empty_prompt_is_refused_and_named():
    for make in (lambda rows: pad_batch(rows, 9), pack_batch):
        with pytest.raises(ValueError, match="row 1 has an empty prompt"):
            make([([1], [2]), ([], [3])])


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    yield LlamaForCausalLM(config).double()
    torch.set_num_threads(threads)


def random_rows(n=8, seed=0):
    rng = random.Random(seed)

    def ids(k):
        return [rng.randrange(50) for _ in range(k)]

    rows = [(ids(rng.randint(1, 6)), ids(rng.randint(1, 9))) for _ in range(n)]
    rows[3] = (rows[3][0], [])
    return rows


def response_logprobs(model, batch, packed):
    """Log-probs [B, T] the way a learner computes them: the head runs on response positions only."""
    hidden_RLH = model.model(
        batch.input_ids_RL,
        attention_mask=None if packed else batch.attention_mask_RL,
        position_ids=batch.position_ids_RL,
        use_cache=False,
    ).last_hidden_state
    logprobs_NV = model.lm_head(batch.select(hidden_RLH)).log_softmax(-1)
    return batch.unpack(logprobs_NV.gather(1, batch.targets_N[:, None])[:, 0])


def test_padded_and_packed_logprobs_equal_the_model_run_on_each_sample(model):
    rows = random_rows()
    padded_BT = response_logprobs(model, pad_batch(rows, 0), packed=False)
    packed_BT = response_logprobs(model, pack_batch(rows), packed=True)
    torch.testing.assert_close(packed_BT, padded_BT, rtol=1e-12, atol=1e-12)
    for b, (prompt, response) in enumerate(rows):
        logprobs_LV = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = [logprobs_LV[len(prompt) - 1 + t, token].item() for t, token in enumerate(response)]
        assert padded_BT[b, : len(response)].tolist() == pytest.approx(expected, abs=1e-12)
        assert (padded_BT[b, len(response) :] == 0).all()


def gradients(model, rows, advantages, plan, make, mode, policy_loss):
    """Gradients of all parameters after the micro-batches of `plan`, in one vector."""
    denominator = sum(1 if mode != "token_mean" else len(response) for _, response in rows if response)
    packed = make is pack_batch
    model.zero_grad()
    for indices in plan:
        batch = make([rows[i] for i in indices])
        mask_BT = batch.response_mask_BT
        logprobs_BT = response_logprobs(model, batch, packed)
        old_BT = (logprobs_BT * 1.05).detach()
        loss, _ = policy_loss(
            logprobs_BT,
            old_BT,
            advantages[indices][:, None].expand_as(old_BT),
            mask_BT,
            token_weights(mask_BT, mode, denominator, max_length=9),
            clip_low=0.2,
            clip_high=0.28,
        )
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", [ppo_clip, gspo])
def test_one_batch_equals_micro_batches_padded_or_packed(model, mode, policy_loss):
    rows, advantages = random_rows(), torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [len(prompt) + len(response) for prompt, response in rows]

    def padded(rows):
        return pad_batch(rows, 0)

    assert count(padded(rows).response_mask_BT, mode) == sum(
        len(response) if mode == "token_mean" else 1 for _, response in rows if response
    )
    whole = gradients(model, rows, advantages, [list(range(8))], padded, mode, policy_loss)
    assert whole.norm() > 1e-4
    for plan, make in [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], padded),
        ([list(range(8))], pack_batch),
        (micro_batches(lengths, 30), pack_batch),
        (padded_micro_batches(lengths, 30), padded),
    ]:
        torch.testing.assert_close(
            gradients(model, rows, advantages, plan, make, mode, policy_loss), whole, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_samples_runs_a_row_that_adds_nothing(model, packed):
    rows = [([0], [])]
    batch = pack_batch(rows) if packed else pad_batch(rows, 0)
    model.zero_grad()
    logprobs_BT = response_logprobs(model, batch, packed)
    weights_BT = token_weights(batch.response_mask_BT, "token_mean", 17)
    loss, metrics = ppo_clip(
        logprobs_BT, logprobs_BT, logprobs_BT, batch.response_mask_BT, weights_BT, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert loss == 0 and metrics["clip_frac"].tolist() == [0, 0]
    # Zero, not missing: every collective of a sharded backward pass takes place.
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
