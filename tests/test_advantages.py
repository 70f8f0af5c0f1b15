"""Advantage estimators against golden vectors, plain-Python definitions and properties that any right answer has."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest
import torch

from raypipe.advantages import (
    ESTIMATORS,
    adaptive_kl,
    explained_variance,
    gae,
    grpo,
    merge_moments,
    moments,
    overlong_penalty,
    reinforce_pp,
    token_rewards,
    whiten,
)

CASES = json.loads((Path(__file__).parent / "cases" / "algorithms.json").read_text())
DTYPES = [torch.float32, torch.float64]


def golden(*kinds):
    """Parametrizes over the golden cases of these kinds."""
    cases = [case for case in CASES if case["kind"] in kinds]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[f"{c['id']}-{c['kind']}-{c['name']}" for c in cases])


def check(case, dtype, **actual):
    """Every actual value equals the case's expected value, to 1e-5 in float32 and the case's tolerance in float64."""
    tolerance = case["tolerance"] if dtype == torch.float64 else 1e-5
    for key, value in actual.items():
        assert value.dtype == dtype
        expected = torch.tensor(case["expected"][key], dtype=dtype)
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert actual.keys() == case["expected"].keys()


@pytest.mark.parametrize("dtype", DTYPES)
@golden("gae")
def test_gae_golden(case, dtype):
    inputs = case["inputs"]
    rewards_BT = torch.tensor(inputs["token_rewards"], dtype=dtype)
    values_BT = torch.tensor(inputs["values"], dtype=dtype)
    mask_BT = torch.tensor(inputs["mask"]).bool()
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, inputs["gamma"], inputs["lambda"])
    whitened_BT = whiten(advantages_BT, mask_BT)
    check(case, dtype, advantages_raw=advantages_BT, returns=returns_BT, advantages_whitened=whitened_BT)


@pytest.mark.parametrize("dtype", DTYPES)
@golden("reinforce_pp")
def test_reinforce_pp_golden(case, dtype):
    rewards_BT = torch.tensor(case["inputs"]["token_rewards"], dtype=dtype)
    mask_BT = torch.tensor(case["inputs"]["mask"]).bool()
    returns_BT = reinforce_pp(rewards_BT, mask_BT, case["inputs"]["gamma"])
    check(case, dtype, returns=returns_BT, advantages_whitened=whiten(returns_BT, mask_BT))


@pytest.mark.parametrize("dtype", DTYPES)
@golden("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
def test_group_estimators_golden(case, dtype):
    scores_B = torch.tensor(case["inputs"]["scores"], dtype=dtype)
    names = case["inputs"]["group_ids"]
    group_ids_B = torch.tensor([names.index(name) for name in names])
    advantages_B = ESTIMATORS[case["kind"]](scores_B, group_ids_B, torch.ones(len(names), dtype=torch.bool))
    if case["kind"] == "reinforce_pp_baseline":
        lengths_B1 = torch.tensor(case["inputs"]["response_lengths"])[:, None]
        mask_BT = torch.arange(int(lengths_B1.max())) < lengths_B1
        advantages_B = whiten(advantages_B[:, None].expand_as(mask_BT), mask_BT)[:, 0]
    check(case, dtype, advantages=advantages_B)


@golden("adaptive_kl")
def test_adaptive_kl_golden(case):
    inputs = case["inputs"]
    value = adaptive_kl(
        inputs["init"],
        inputs["current_kl"],
        target=inputs["target"],
        horizon=inputs["horizon"],
        n_steps=inputs["n_steps"],
    )
    assert value == pytest.approx(case["expected"]["value"], rel=case["tolerance"])


@pytest.mark.parametrize("dtype", DTYPES)
@golden("overlong_penalty")
def test_overlong_penalty_golden(case, dtype):
    inputs = case["inputs"]
    penalty_B = overlong_penalty(
        torch.tensor(inputs["lengths"], dtype=dtype),
        max_length=inputs["max_length"],
        buffer=inputs["buffer"],
        factor=inputs["factor"],
    )
    check(case, dtype, penalty=penalty_B)


def by_definition(name, scores, group_ids, valid):
    """The estimators as their papers state them, one sample at a time."""
    advantages = []
    for i, score in enumerate(scores):
        group = [s for s, g, v in zip(scores, group_ids, valid, strict=True) if g == group_ids[i] and v]
        if not valid[i] or len(group) == 1:
            advantages.append(0.0)
        elif name == "grpo":
            advantages.append((score - statistics.mean(group)) / (statistics.stdev(group) + 1e-6))
        elif name == "rloo":
            advantages.append(score - (sum(group) - score) / (len(group) - 1))
        else:
            advantages.append(score - statistics.mean(group))
    return advantages


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_estimators_equal_their_definitions_with_failed_samples_and_mixed_groups(name):
    rng = random.Random(0)
    scores = [rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in range(60)]
    group_ids = [rng.choice([-7, 0, 3, 2**40, 2**62, 11]) for _ in scores]
    valid = [rng.random() < 0.7 for _ in scores]
    given = [s if v else rng.choice([math.nan, math.inf, -math.inf, 9e9]) for s, v in zip(scores, valid, strict=True)]
    advantages_B = ESTIMATORS[name](
        torch.tensor(given, dtype=torch.float64), torch.tensor(group_ids), torch.tensor(valid)
    )
    expected = by_definition(name, scores, group_ids, valid)
    assert advantages_B.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_failed_sample_changes_no_other_and_has_no_advantage(name):
    # Scores 1, 0 and a failed third: the same as 1, 0 alone, and 0 for the third.
    group_ids_B = torch.tensor([5, 5, 5])
    three = ESTIMATORS[name](torch.tensor([1.0, 0.0, math.nan]), group_ids_B, torch.tensor([True, True, False]))
    two = ESTIMATORS[name](torch.tensor([1.0, 0.0]), group_ids_B[:2], torch.tensor([True, True]))
    assert three.tolist() == [*two.tolist(), 0.0]
    assert two[0] > 0


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    ("scores", "valid"),
    [
        ([0.1] * 7, [True] * 7),  # the sum and the mean of 0.1 round
        ([1e8 + 0.1] * 7, [True] * 7),
        ([0.7, math.nan, math.nan], [True, False, False]),
        ([math.nan, math.nan, math.nan], [False, False, False]),
    ],
)
def test_no_difference_is_exactly_no_advantage(name, scores, valid):
    group_ids_B = torch.full((len(scores),), 4)
    scores_B = torch.tensor(scores, dtype=torch.float64)
    assert ESTIMATORS[name](scores_B, group_ids_B, torch.tensor(valid)).tolist() == [0.0] * len(scores)


def test_grpo_does_not_cancel_large_scores():
    # Scores c, c + 1 with c = 1e9: mean c + 0.5, unbiased std sqrt(0.5), advantages -+0.5 / (0.70711 + 1e-6).
    scores_B = torch.tensor([1e9, 1e9 + 1], dtype=torch.float64)
    advantages_B = grpo(scores_B, torch.tensor([0, 0]), torch.tensor([True, True]))
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantages_B.tolist() == pytest.approx([-expected, expected], rel=1e-12)


def test_estimators_accept_an_empty_batch():
    nothing_B = torch.zeros(0)
    for estimator in ESTIMATORS.values():
        assert estimator(nothing_B, nothing_B.long(), nothing_B.bool()).numel() == 0


def test_token_rewards_put_the_score_on_the_last_token_of_the_mask():
    # Row 1: KL 0.1, 0.2 at half weight; the score 1 joins the second token. Row 2: a masked token in the middle.
    # Row 3: no token, so its score is nowhere.
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    kl_BT = torch.tensor([[0.1, 0.2, math.nan], [0.4, 9.0, 0.0], [1.0, 1.0, 1.0]])
    rewards_BT = token_rewards(torch.tensor([1.0, 2.0, 3.0]), kl_BT, mask_BT, kl_coef=0.5)
    torch.testing.assert_close(rewards_BT, torch.tensor([[-0.05, 0.9, 0.0], [-0.2, 0.0, 2.0], [0.0, 0.0, 0.0]]))


def test_gae_of_a_row_equals_gae_of_its_tokens_without_the_masked_ones():
    generator = torch.Generator().manual_seed(0)
    rewards_BT, values_BT = torch.randn(2, 5, 40, dtype=torch.float64, generator=generator)
    mask_BT = torch.rand(5, 40, generator=generator) < 0.6
    garbage_BT = torch.where(mask_BT, 0.0, math.nan)
    advantages_BT, returns_BT = gae(rewards_BT + garbage_BT, values_BT + garbage_BT, mask_BT, 0.97, 0.9)
    assert (advantages_BT[~mask_BT] == 0).all() and (returns_BT[~mask_BT] == 0).all()
    for b in range(5):
        rewards, values = rewards_BT[b][mask_BT[b]].tolist(), values_BT[b][mask_BT[b]].tolist()
        deltas = [r + 0.97 * v_next - v for r, v, v_next in zip(rewards, values, [*values[1:], 0.0], strict=True)]
        # Definition, equation 16 of the paper: the sum of (gamma * lambda)^k * delta_{t + k}.
        for t, (advantage, return_) in enumerate(
            zip(advantages_BT[b][mask_BT[b]].tolist(), returns_BT[b][mask_BT[b]].tolist(), strict=True)
        ):
            expected = sum((0.97 * 0.9) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert advantage == pytest.approx(expected, abs=1e-12)
            assert return_ == pytest.approx(expected + values[t], abs=1e-12)


def test_moments_of_parts_merge_to_those_of_the_whole():
    # 1 and 2: [2, 1.5, 0.5]. 6: [1, 6, 0]. Together 1, 2, 6: mean 3, deviations 4 + 1 + 9 = 14.
    values_BT = torch.tensor([[1.0, 2.0, 99.0], [6.0, math.nan, 99.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    first, second = moments(values_BT[:1], mask_BT[:1]), moments(values_BT[1:], mask_BT[1:])
    empty = moments(values_BT, torch.zeros_like(mask_BT))
    assert first.tolist() == [2.0, 1.5, 0.5]
    assert merge_moments(torch.stack([first, empty, second])).tolist() == pytest.approx([3.0, 3.0, 14.0])
    assert moments(values_BT, mask_BT).tolist() == pytest.approx([3.0, 3.0, 14.0])


def test_whitening_a_part_with_merged_moments_equals_whitening_the_whole():
    # Large and nearly equal values: sums of squares, even in float64, would keep no digit of the variance.
    values_BT = 1e9 + torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask_BT = torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    whole_BT = whiten(values_BT, mask_BT)
    merged = merge_moments(torch.stack([moments(values_BT[:3], mask_BT[:3]), moments(values_BT[3:], mask_BT[3:])]))
    parts_BT = torch.cat([whiten(values_BT[:3], mask_BT[:3], merged), whiten(values_BT[3:], mask_BT[3:], merged)])
    torch.testing.assert_close(parts_BT, whole_BT, rtol=1e-6, atol=1e-6)
    inside = whole_BT[mask_BT]
    assert inside.mean().item() == pytest.approx(0, abs=1e-6) and inside.std().item() == pytest.approx(1, abs=1e-6)
    assert (whole_BT[~mask_BT] == 0).all()


def test_whiten_of_equal_values_one_token_or_none_is_zero():
    for values, mask in [([0.1, 0.1, 0.1], [1, 1, 1]), ([5.0, 7.0, 9.0], [0, 1, 0]), ([1.0, 2.0, 3.0], [0, 0, 0])]:
        whitened_BT = whiten(torch.tensor([values]), torch.tensor([mask]).bool())
        torch.testing.assert_close(whitened_BT, torch.zeros(1, 3), rtol=0, atol=1e-9)


def test_explained_variance():
    # Returns 1, 3 (deviations 2) and values 2, 3 (errors -1, 0: deviations 0.5): 1 - 0.5 / 2 = 0.75.
    returns_BT, values_BT, mask_BT = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 3.0]]), torch.ones(1, 2).bool()
    error_3, return_3 = moments(returns_BT - values_BT, mask_BT), moments(returns_BT, mask_BT)
    assert explained_variance(error_3, return_3) == pytest.approx(0.75)
    assert math.isnan(explained_variance(error_3, moments(torch.ones(1, 2), mask_BT)))


def test_adaptive_kl_falls_below_the_target_and_is_clipped():
    # KL 0.09 of 0.1: error -0.1, 50 of 100 samples: 1 - 0.05. KL 0: error -1, clipped to -0.2.
    assert adaptive_kl(1.0, 0.09, target=0.1, horizon=100, n_steps=50) == pytest.approx(0.95)
    assert adaptive_kl(1.0, 0.0, target=0.1, horizon=100, n_steps=50) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="target=0"):
        adaptive_kl(1.0, 0.1, target=0, horizon=100, n_steps=1)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_penalty_refuses_an_impossible_buffer(buffer):
    with pytest.raises(ValueError, match=str(buffer)):
        overlong_penalty(torch.tensor([50]), max_length=100, buffer=buffer, factor=1.0)
