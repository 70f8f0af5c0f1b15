"""CountdownGrader: formulas that are right, wrong, in parts right, hostile, and rows in both forms."""

import json
import time

import pytest

from graders.countdown import CountdownGrader


def grade(response, numbers=(3, 7, 2), target=20, **kwargs):
    return CountdownGrader(**kwargs)(
        data_sources=["countdown"], solution_strs=[response], ground_truths=["an answer"],
        extra_infos=[{"entry": {"metadata": {"numbers": list(numbers), "target": target}}}],
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    "response, score",
    [
        ("3 * 7 - 2", None),
        ("3 * 7 - 1", 0.2 * 2 / 3),
        ("2 + 3 * 7", 0.2),
        ("3 * 7", 0.2 * 2 / 3),
        ("7", 0.2 / 3),
        ("20", 0.0),
        ("3 * 7 - 2 + 2 - 2", 0.2 * 3 / 5),
        ("3 * 7 - 2 = 19", 0.0),
        ("The answer is 3 * 7 - 2", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_partial_credit_is_the_share_of_right_numbers(response, score):
    found = grade(response, target=19)
    assert found["score"] == (1.0 if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    "response",
    ["(3 * 7) - 2", "-2+7*3", "\\boxed{3 * 7 - 2}", "<think>3 * 2?</think><answer> 3*7-2 </answer>", "3 * 7 - 2\n"],
)
def test_right_formulas_in_each_form(response):
    assert grade(response, target=19) == {"score": 1.0, "numbers": 1.0}


def test_division_is_exact_and_by_zero_is_wrong():
    assert grade("1 / 3 * 3", numbers=(1, 3, 3), target=1)["score"] == 1.0
    assert grade("2 / (3 - 3)", numbers=(2, 3, 3), target=1) == {"score": 0.2, "numbers": 1.0}
    assert grade("7 / 2", numbers=(7, 2), target=3)["score"] == 0.2  # not floored


@pytest.mark.parametrize(
    "response",
    [
        "9 ** 9 ** 9", "7 // 2", "__import__('os').system('true')", "3 * 7 - 2 # 19", "3(7)2", "0x13", "1e1", "3_7 - 2",
        "(" * 90 + "3" + ")" * 90 + " * 7 - 2.", "+" * 199 + "3", "((((" * 5000, "3 *", "007",
    ],
)  # fmt: skip
def test_nothing_but_plain_formulas_is_read(response):
    start = time.process_time()
    assert grade(response, target=19)["score"] < 0.2
    assert time.process_time() - start < 1


def test_partial_credit_is_a_share_of_full_credit():
    with pytest.raises(ValueError, match="partial=2 must be from 0 to 1"):
        CountdownGrader(partial=2)


def test_rows_of_both_forms_and_of_none():
    task = {"numbers": [1, 2], "target": 3}
    grader = CountdownGrader()
    forms = [(task, {}), ("x", {"entry": {"metadata": task}}), ("x", {"entry": json.dumps({"metadata": task})})]
    for key, info in forms:
        [found] = grader(data_sources=["c"], solution_strs=["1 + 2"], ground_truths=[key], extra_infos=[info])
        assert found["score"] == 1.0
    with pytest.raises(ValueError, match="needs {numbers, target}"):
        grader(data_sources=["c"], solution_strs=["1 + 2"], ground_truths=["3"], extra_infos=[None])
