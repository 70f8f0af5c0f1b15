"""avg@k, pass@k, maj@k and their intervals, on numbers worked out by hand or by brute force."""

import itertools
import random

import numpy as np
import pytest

from raypipe.estimates import PromptSamples, bootstrap, estimate, ks, maj_at_k, measures, pass_at_k, wilson

RNG = np.random.default_rng(0)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_is_exact():
    assert pass_at_k(200, 100, 1) == 0.5
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    # Worked by hand: 1 - C(8,2)/C(10,2) = 1 - 28/45.
    assert pass_at_k(10, 2, 2) == pytest.approx(17 / 45)


def test_the_majority_wins_and_ties_are_shared():
    assert maj_at_k(["a", "a", "b"], [True, True, False], 3, RNG) == 1
    assert maj_at_k(["a", "b", "b"], [True, False, False], 3, RNG) == 0
    assert maj_at_k(["a", "a", "b", "b"], [True, True, False, False], 4, RNG) == 0.5
    assert maj_at_k(["a", "b", "c"], [True, False, False], 3, RNG) == pytest.approx(1 / 3)


def test_a_sample_without_an_answer_does_not_vote():
    assert maj_at_k([None, None, "a"], [False, False, True], 3, RNG) == 1
    assert maj_at_k([None, None, None], [True, True, True], 3, RNG) == 0, "nothing was answered"


def test_majority_of_fewer_samples_is_the_mean_over_subsets():
    answers = ["a", "a", "a", "b", "b", "c"]
    passes = [answer == "a" for answer in answers]
    exact = np.mean(
        [
            maj_at_k([answers[i] for i in subset], [passes[i] for i in subset], 4, RNG)
            for subset in itertools.combinations(range(6), 4)
        ]
    )
    draws = [maj_at_k(answers, passes, 4, np.random.default_rng(seed)) for seed in range(30)]
    assert np.mean(draws) == pytest.approx(exact, abs=0.02)


def test_k_doubles_up_to_n():
    assert ks(1) == [1] and ks(2) == [1, 2] and ks(6) == [1, 2, 4, 6] and ks(8) == [1, 2, 4, 8]


def test_wilson_is_as_published():
    # 8 of 10: Wilson's interval is (0.4902, 0.9433); 0 of 10: (0, 0.2775).
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_bootstrap_is_near_the_normal_interval_and_repeats():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap(values, 0)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05)
    assert bootstrap(values, 0) == (low, high) != bootstrap(values, 1)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    draw = random.Random(0)
    held = 0
    for trial in range(300):
        skills = [draw.betavariate(2, 3) for _ in range(60)]
        values = [sum(draw.random() < skill for _ in range(4)) / 4 for skill in skills]
        found = estimate(values, trial)
        held += found.low <= 0.4 <= found.high
    assert 0.90 <= held / 300 <= 0.99


def test_the_prompt_is_the_unit():
    once = [PromptSamples([1.0], [True], ["a"]), PromptSamples([0.0], [False], ["b"])] * 20
    copied = [PromptSamples(p.scores * 8, p.passes * 8, p.answers * 8) for p in once]
    one, eight = measures(once, 1)["avg@1"], measures(copied, 8)["avg@8"]
    assert (one.value, one.low, one.high) == (eight.value, eight.low, eight.high), "copies are no new evidence"


def test_measures_of_prompts_with_missing_grades():
    full = PromptSamples([1.0, 0.0, 1.0, 1.0], [True, False, True, True], ["4", "5", "4", "4"])
    half = PromptSamples([0.5, 0.0], [False, False], ["1", "2"])
    none = PromptSamples([], [], [])
    found = measures([full, half, none], 4)
    assert list(found) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert found["avg@4"].value == pytest.approx((0.75 + 0.25) / 2)
    assert found["pass@1"].value == pytest.approx((0.75 + 0) / 2) and found["pass@1"].prompts == 2
    assert found["pass@4"].value == 1 and found["pass@4"].prompts == 1, "a prompt with 2 grades says nothing at 4"
    assert found["maj@4"].value == 1
    assert measures([none], 4) == {}
