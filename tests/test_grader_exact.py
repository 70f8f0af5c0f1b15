"""ExactGrader against its cases and further inputs of each kind, and the functions that find an answer."""

import json
import time
from pathlib import Path

import pytest

from graders.exact import ExactGrader, after_thinking, last_answer_tag, last_boxed, last_line

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "exact.jsonl").read_text().splitlines()]


def score(response, key, **options):
    grader = ExactGrader(**options)
    return grader(data_sources=["t"], solution_strs=[response], ground_truths=[key], extra_infos=[{}])[0]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case):
    started = time.process_time()
    assert score(case["response"], case["ground_truth"], **case["options"]) == case["score"], case["why"]
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("response", "key", "options"),
    [
        ("\u3000Oslo\u2003\r\n", "Oslo", {}),
        ("Oslo", " Oslo ", {}),
        ("A\u030angstro\u0308m", "Ångström", {}),
        ("ΟΔΟΣ", "οδός".replace("ό", "ο"), {"ignore_case": True}),
        ("ﬁnal", "FINAL", {"ignore_case": True}),
        ("\u1e9e", "ss", {"ignore_case": True}),
        ("CAFE\u0301", "café", {"ignore_case": True}),
        ("<answer>Bergen</answer> or <answer>Oslo</answer>", "Oslo", {"extract": "answer_tag"}),
        ("<answer>\nOslo\n</answer>.", "Oslo", {"extract": "answer_tag"}),
        ("<think><answer>Bergen</answer></think><answer>Oslo</answer>", "Oslo", {"extract": "answer_tag"}),
        ("Bergen\n  Oslo  \n\n\u00a0\n", "Oslo", {"extract": "last_line"}),
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}", {"extract": "boxed"}),
        ("<think>a</think><think>b</think>Oslo", "Oslo", {}),
        ("7", [None, "", 7], {}),
        ("-0.5", -0.5, {}),
        ("12345678901234567890", 12345678901234567890, {}),
        ("False", False, {}),
        ("false", False, {"ignore_case": True}),
        ("Oslo", ("Bergen", "Oslo"), {}),
    ],
)
def test_equal(response, key, options):
    assert score(response, key, **options) == 1.0


@pytest.mark.parametrize(
    ("response", "key", "options"),
    [
        ("Oslo.", "Oslo", {}),
        ("Oslo\nOslo", "Oslo", {}),
        ("OSLO", "Oslo", {}),
        ("Oslo ", "Oslo", {"strip": False}),
        ("\u200bOslo", "Oslo", {}),
        ("Os\u00adlo", "Oslo", {}),
        ("Ｏｓｌｏ", "Oslo", {}),
        ("x²", "x2", {}),
        ("O s l o", "Oslo", {}),
        ("<answer>Oslo", "Oslo", {"extract": "answer_tag"}),
        ("<answer>Oslo</answer> <answer>Bergen</answer>", "Oslo", {"extract": "answer_tag"}),
        ("<answer>Oslo</answer>", "Oslo", {}),
        ("\\boxed{Oslo", "Oslo", {"extract": "boxed"}),
        ("Oslo\nis it", "Oslo", {"extract": "last_line"}),
        (" \n", "Oslo", {"extract": "last_line"}),
        ("<think>Oslo", "Oslo", {}),
        ("<think>Oslo</think>", "Oslo", {}),
        ("Oslo<think>", "Oslo", {}),
        ("7.0", 7, {}),
        ("true", True, {}),
        ("1", True, {}),
        ("", [""], {}),
        ("", [], {}),
        (" ", " ", {"strip": False}),
        ("None", [None], {}),
        (None, None, {}),
        (None, [None, ""], {}),
    ],
)
def test_different(response, key, options):
    assert score(response, key, **options) == 0.0


def test_batch_keeps_order():
    grader = ExactGrader()
    scores = grader(
        data_sources=["t"] * 3, solution_strs=["a", None, "c"], ground_truths=["a", "b", "c"], extra_infos=[{}] * 3
    )
    assert scores == [1.0, 0.0, 1.0]


def test_config_and_data_mistakes_are_named():
    with pytest.raises(ValueError, match="extract='tag' is unknown: choose one of whole, answer_tag, boxed, last_line"):
        ExactGrader(extract="tag")
    with pytest.raises(ValueError, match="ground_truth=.*'target'.*needs a text, a number or a list"):
        score("1", {"target": 1})


def test_after_thinking():
    assert after_thinking("a</think>b") == "b"  # the template may have put <think> into the prompt
    assert after_thinking("plain") == "plain"
    assert after_thinking("<think>a</think>b<think>c") is None
    assert after_thinking(None) is None


def test_last_of_each():
    assert last_answer_tag("<answer>a<answer>b</answer></answer>") == "b"
    assert last_answer_tag("none") is None
    assert last_boxed(r"\boxed{a} \fbox{b}") == "b"
    assert last_boxed(r"\fbox{b} \boxed{a\}}") == r"a\}"
    assert last_boxed(r"\boxed{a} \boxed{b") is None
    assert last_boxed("a") is None
    assert last_line("a\n\nb\n \n") == "b"
    assert last_line("\n") is None


@pytest.mark.parametrize(
    "unit", ["<answer>", "</answer>", "\\boxed{", "\\boxed{}", "{", "\n", "<think>", "</think>", "e\u0301", "\\"]
)
@pytest.mark.parametrize("extract", ["whole", "answer_tag", "boxed", "last_line"])
def test_long_responses_are_quick(unit, extract):
    started = time.process_time()
    assert score(unit * (1_000_000 // len(unit)), "x", extract=extract) == 0.0
    assert time.process_time() - started < 5
