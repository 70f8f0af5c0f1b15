"""Micro-batches within their budget, the layout of their rows, and both against a transformers model."""

import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from raypipe.batching import Layout, bundle, lay_out, micro_batches, pad_tokens, split
from raypipe.losses import AGGREGATIONS, count, gspo, ppo_clip, token_weights
from raypipe.modeling import Critic, Policy, keeps_samples_apart, layout, shares_prompts


def width(lengths, rows):
    """Length of a micro-batch's rows."""
    return max(sum(lengths[i] for i in row) for row in rows)


def random_lengths(n, seed=0):
    """Long-tailed, as responses are."""
    rng = random.Random(seed)
    return [min(4096, 64 + int(rng.lognormvariate(5.5, 0.9))) for _ in range(n)]


def test_micro_batches_by_hand():
    # Rows of 7: 5 opens the first, 4 the second; 3 fits beside the 4 exactly, 2 beside the 5.
    assert micro_batches([3, 5, 4, 2], 14, 7) == [[[1, 3], [2, 0]]]
    # One row fits into the budget.
    assert micro_batches([3, 5, 4, 2], 7, 7) == [[[1, 3]], [[2, 0]]]
    # Best fit: 3 could join the 5 (8 of 9) or the 6 (9 of 9) and joins the fuller.
    assert micro_batches([5, 6, 3], 18, 9) == [[[1, 2], [0]]]
    # A row is as long as the longest sample; 6 alone leaves no room in it, and a second row of 6 is too much.
    assert micro_batches([6, 3, 2], 11, 4) == [[[0]], [[1], [2]]]


def test_rows_of_one_sample_by_hand():
    # 5 and 4 in rows of 5; a third row would make it 15.
    assert micro_batches([3, 5, 4, 2], 14, 0) == [[[1], [2]], [[0], [3]]]


@pytest.mark.parametrize("row_tokens", [0, 5, 10, 1000])
def test_a_sample_above_the_budget_is_alone(row_tokens):
    assert micro_batches([20, 11], 10, row_tokens) == [[[0]], [[1]]]
    assert micro_batches([], 10, row_tokens) == []


@pytest.mark.parametrize("row_tokens", [0, 256, 4096, 1_000_000])
@pytest.mark.parametrize("budget", [100, 2048, 8192])
def test_every_sample_is_in_one_micro_batch_within_the_budget(row_tokens, budget):
    lengths = random_lengths(300)
    plan = micro_batches(lengths, budget, row_tokens)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(300))
    assert plan == micro_batches(np.array(lengths), budget, row_tokens)
    for rows in plan:
        assert len(rows) * width(lengths, rows) <= budget or [len(row) for row in rows] == [1]
        assert row_tokens or all(len(row) == 1 for row in rows)


@pytest.mark.parametrize("n", [64, 512])
@pytest.mark.parametrize("budget", [8192, 65536])
def test_little_is_padding(n, budget):
    lengths = [length // 8 for length in random_lengths(n)]
    spent = sum(len(rows) * width(lengths, rows) for rows in micro_batches(lengths, budget, 256))
    assert sum(lengths) >= 0.95 * spent
    assert len(micro_batches(lengths, budget, budget)) <= -(-sum(lengths) // budget) + 1


@pytest.mark.parametrize("budget", [0, -5])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(ValueError, match=f"token_budget={budget}"):
        micro_batches([1], budget, 256)


# The example of the module docstring, a = 1, b = 2, ...
EXAMPLE = [[([1, 2], [3, 4]), ([5], [6])], [([7], [8, 9])]]


def test_lay_out_by_hand():
    batch = lay_out(EXAMPLE)
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert batch.response_mask_BT.tolist() == [[True, True], [True, False], [True, True]]
    assert batch.select_N.tolist() == [1, 2, 4, 6, 7]
    assert batch.targets_N.tolist() == [3, 4, 6, 8, 9]
    assert batch.n_tokens == 9


@pytest.mark.parametrize("rows", [EXAMPLE, [[sample] for row in EXAMPLE for sample in row]])
def test_select_takes_the_predecessor_of_each_response_token_and_unpack_puts_it_back(rows):
    # An "output" that is the token itself: the predecessors of 3, 4, 6, 8 and 9 are 2, 3, 5, 7 and 8.
    batch = lay_out(rows)
    selected = batch.select(batch.input_ids_RL)
    assert selected.tolist() == [2, 3, 5, 7, 8]
    assert batch.unpack(selected).tolist() == [[2, 3], [5, 0], [7, 8]]
    values_N = torch.tensor([0.5, 1.5, 2.5, 0.0, 0.0], requires_grad=True)
    batch.unpack(values_N).mul(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum().backward()
    assert values_N.grad.tolist() == [1.0, 2.0, 3.0, 5.0, 6.0]


def test_pad_tokens_aligns_a_column_with_the_responses():
    batch = lay_out([EXAMPLE[0], [([7, 8], [])]])
    rows = [np.array([0.5, -1.5], np.float32), [2.0], []]
    assert pad_tokens(rows, batch).tolist() == [[0.5, -1.5], [2.0, 0.0], [0.0, 0.0]]
    with pytest.raises(AssertionError, match="one value per response token"):
        pad_tokens([[0.5], [2.0, 1.0], []], batch)  # the right total, the wrong rows


def test_a_shared_prompt_by_hand():
    # "a b | c d" and "a b | e" share a b; "a | b" after them does not, and f stands in the second row.
    batch = lay_out([[([1, 2], [3, 4]), ([1, 2], [5]), ([1], [2])], [([6], [])]], shares_prompts=True)
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4, 5, 1, 2], [6, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 2, 0, 1], [0, 0, 0, 0, 0, 0, 0]]
    assert batch.select_N.tolist() == [1, 2, 1, 5]
    assert batch.targets_N.tolist() == [3, 4, 5, 2]
    assert batch.n_tokens == 8
    seen = [[j for j in range(7) if row[j]] for row in batch.attention_mask[0, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5], [5, 6]]
    assert batch.attention_mask[1, 0].any(-1).all()  # padding sees something, or attention would not be a number


def test_without_a_prompt_twice_in_a_row_nothing_is_shared():
    rows = [[([1], [2]), ([3], [4]), ([1], [5])], [([1], [6])]]
    for shared, plain in zip(
        vars(lay_out(rows, shares_prompts=True)).values(), vars(lay_out(rows)).values(), strict=True
    ):
        assert torch.equal(shared, plain) if isinstance(plain, torch.Tensor) else shared == plain


def test_bundles_by_hand():
    samples = [([1, 2], [3] * 4), ([9], [3]), ([1, 2], [3]), ([1, 2], [3] * 2), ([1, 2], []), ([1, 2], [3] * 20)]
    # 2 + 4 + 1 tokens leave no room for 2 more in 8; what is longer than a bundle may be is alone.
    assert bundle(samples, 8) == [[0, 2], [1], [3, 4], [5]]
    assert bundle(samples, 100) == [[0, 2, 3, 4, 5], [1]]
    # The last sample makes rows 22 long: all others fit into one, with their prompt once.
    assert split(samples, 100, Layout(8, True)) == [[[5], [0, 2, 3, 4, 1]]]
    assert split(samples, 100, Layout(8, False)) == micro_batches([6, 2, 3, 4, 2, 22], 100, 8)


@pytest.mark.parametrize("row_tokens", [256, 4096])
@pytest.mark.parametrize("budget", [100, 2048])
def test_every_sample_is_in_one_micro_batch_with_shared_prompts(row_tokens, budget):
    samples = [([i % 40] * 20, [0] * (length // 8)) for i, length in enumerate(random_lengths(300))]
    plan = split(samples, budget, Layout(row_tokens, True))
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(300))
    for rows in plan:
        batch = lay_out([[samples[i] for i in row] for row in rows], shares_prompts=True)
        assert batch.input_ids_RL.numel() <= budget or [len(row) for row in rows] == [1]


def test_an_empty_prompt_is_refused_and_named():
    with pytest.raises(ValueError, match="sample 1 has an empty prompt"):
        lay_out([[([1], [2]), ([], [3])]])


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


def response_logprobs(model, batch):
    """Log-probs [B, T] the way a learner computes them: the head runs on response positions only."""
    hidden_RLH = model.model(
        batch.input_ids_RL, batch.attention_mask, batch.position_ids_RL, use_cache=False
    ).last_hidden_state  # fmt: skip
    logprobs_NV = model.lm_head(batch.select(hidden_RLH)).log_softmax(-1)
    return batch.unpack(logprobs_NV.gather(1, batch.targets_N[:, None])[:, 0])


@pytest.mark.parametrize("rows", [[8], [3, 5], [1] * 8, [2, 1, 1, 4]])
def test_logprobs_equal_the_model_run_on_each_sample(model, rows):
    samples = random_rows()
    starts = [sum(rows[:r]) for r in range(len(rows))]
    found_BT = response_logprobs(model, lay_out([samples[a : a + n] for a, n in zip(starts, rows, strict=True)]))
    for b, (prompt, response) in enumerate(samples):
        logprobs_LV = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = [logprobs_LV[len(prompt) - 1 + t, token].item() for t, token in enumerate(response)]
        assert found_BT[b, : len(response)].tolist() == pytest.approx(expected, abs=1e-12)
        assert (found_BT[b, len(response) :] == 0).all()


# Families by what their layers see: everything, with the head's capping or not; a window in some or all layers.
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "gpt_neox": {}, "phi3": {}, "olmo2": {}, "granite": {},
    "qwen2 with a window": {"use_sliding_window": True, "max_window_layers": 1}, "gemma2": {}, "gemma3_text": {},
    "mistral": {"sliding_window": 8},
}  # fmt: skip
WINDOWED = {"qwen2 with a window", "gemma2", "gemma3_text", "mistral"}


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_that_share_a_prompt_get_the_log_probs_that_they_get_alone(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.split()[0], vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        **FAMILIES[family],
    )  # fmt: skip
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().double())
    assert shares_prompts(policy, "sdpa") == (family not in WINDOWED)
    assert not shares_prompts(policy, "eager") and not shares_prompts(policy, "flash_attention_2")
    if family in WINDOWED:
        return
    draw = random.Random(1)
    first, second = [draw.randrange(50) for _ in range(7)], [draw.randrange(50) for _ in range(3)]
    samples = [
        (p, [draw.randrange(50) for _ in range(n)]) for p, n in [(first, 5), (first, 0), (first, 3), (second, 4)]
    ]
    samples += [(second, [draw.randrange(50) for _ in range(6)])]
    with torch.no_grad():
        alone_N, _ = policy(lay_out([[sample] for sample in samples]), 0.7)
        for rows in ([samples], [samples[:3], samples[3:]]):
            shared_N, _ = policy(lay_out(rows, shares_prompts=True), 0.7)
            torch.testing.assert_close(shared_N, alone_N, rtol=0, atol=1e-5)


def test_a_policy_and_a_critic_of_another_family_get_what_both_compute_right(model):
    config = AutoConfig.for_model(
        "mistral", vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8, num_labels=1,
    )  # fmt: skip
    critic = Critic(AutoModelForTokenClassification.from_config(config, attn_implementation="sdpa").eval().double())
    cpu = torch.device("cpu")
    assert layout([Policy(model)], "sdpa", cpu, 1000) == Layout(256, shares_prompts=True)
    assert layout([Policy(model), critic], "sdpa", cpu, 1000) == Layout(256, shares_prompts=False)


def test_a_family_that_looks_at_the_whole_row_is_found_out(model):
    assert keeps_samples_apart(Policy(model), torch.device("cpu"))
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert not keeps_samples_apart(Policy(MambaForCausalLM(config).eval()), torch.device("cpu"))


def gradients(model, samples, advantages, plan, mode, policy_loss):
    """Gradients of all parameters after the micro-batches of `plan`, in one vector."""
    denominator = sum(1 if mode != "token_mean" else len(response) for _, response in samples if response)
    model.zero_grad()
    for rows in plan:
        batch = lay_out([[samples[i] for i in row] for row in rows])
        logprobs_BT = response_logprobs(model, batch)
        old_BT = (logprobs_BT * 1.05).detach()
        indices = [i for row in rows for i in row]
        loss, _ = policy_loss(
            logprobs_BT,
            old_BT,
            advantages[indices][:, None].expand_as(old_BT),
            batch.response_mask_BT,
            token_weights(batch.response_mask_BT, mode, denominator, max_length=9),
            clip_low=0.2,
            clip_high=0.28,
        )
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", [ppo_clip, gspo])
def test_one_batch_equals_micro_batches_of_any_layout(model, mode, policy_loss):
    samples, advantages = random_rows(), torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [len(prompt) + len(response) for prompt, response in samples]
    alone = [[i] for i in range(8)]
    assert count(lay_out([samples]).response_mask_BT, mode) == sum(
        len(response) if mode == "token_mean" else 1 for _, response in samples if response
    )
    whole = gradients(model, samples, advantages, [alone], mode, policy_loss)
    assert whole.norm() > 1e-4
    for plan in [
        [alone[:4], alone[4:]],
        [[list(range(8))]],
        *(micro_batches(lengths, 30, row_tokens) for row_tokens in (0, 15, 30)),
    ]:
        torch.testing.assert_close(
            gradients(model, samples, advantages, plan, mode, policy_loss), whole, rtol=1e-10, atol=1e-12
        )


def test_a_rank_without_samples_runs_a_row_that_adds_nothing(model):
    batch = lay_out([[([0], [])]])
    model.zero_grad()
    logprobs_BT = response_logprobs(model, batch)
    weights_BT = token_weights(batch.response_mask_BT, "token_mean", 17)
    loss, metrics = ppo_clip(
        logprobs_BT, logprobs_BT, logprobs_BT, batch.response_mask_BT, weights_BT, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert loss == 0 and metrics["clip_frac"].tolist() == [0, 0]
    # Zero, not missing: every collective of a sharded backward pass takes place.
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
