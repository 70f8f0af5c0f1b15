"""FormatGrader against its cases, further inputs of each kind, and patterns that backtrack for ever."""

import json
import time
from pathlib import Path

import pytest

from graders.format import FormatGrader

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "format.jsonl").read_text().splitlines()]


def grade(grader, response, ground_truth=None, extra_info=None):
    (result,) = grader(
        data_sources=["t"], solution_strs=[response], ground_truths=[ground_truth], extra_infos=[extra_info or {}]
    )
    return result


def score(response, spec):
    result = grade(FormatGrader(spec=spec), response)
    return result["score"] if isinstance(result, dict) else result


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
@pytest.mark.parametrize("place", ["config", "extra_info", "ground_truth"])
def test_case(case, place):
    def result():
        if place == "config":
            return grade(FormatGrader(spec=case["spec"]), case["response"])
        if place == "extra_info":
            return grade(FormatGrader(), case["response"], extra_info={"format": case["spec"]})
        return grade(FormatGrader(), case["response"], ground_truth=case["spec"])

    started = time.process_time()
    if case["kind"] == "regex_bad_pattern":  # an error, wherever it stands, so that it never pays
        with pytest.raises(ValueError, match=r"spec.pattern='\(unclosed' is not a regular expression"):
            result()
    else:
        scored = result()
        assert (scored["score"] if isinstance(scored, dict) else scored) == case["score"], case["why"]
    assert time.process_time() - started < 10


THINK_ANSWER = {"kind": "think_answer"}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("\n\t<think>a</think>\u00a0<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ('<think>a < b and <b>bold</b></think><answer>{"x": 1}</answer>', 1.0),
        ("Well: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer>b<answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer><answer>c</answer></answer>", 0.0),
        ("<think>\n\u2003</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>\u200b\ufeff</answer>", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("< think>a</ think><answer>b</answer>", 0.0),
        ("<answer>b</answer></think>a<think>", 0.0),
        (None, 0.0),
    ],
)
def test_think_answer(response, expected):
    assert score(response, THINK_ANSWER) == expected


@pytest.mark.parametrize(
    ("response", "spec", "expected"),
    [
        ("xAB-1234", {"pattern": r"\bAB-\d+"}, 0.0),
        ("AB-1234", {"pattern": r"[A-Z]{2}-\d{4}", "mode": "fullmatch"}, 1.0),
        ("AB-1234\n", {"pattern": r"[A-Z]{2}-\d{4}", "mode": "fullmatch"}, 0.0),
        ("a\nb", {"pattern": "a.b"}, 0.0),
        ("a\nb", {"pattern": "a.b", "mode": "fullmatch", "flags": ["DOTALL"]}, 1.0),
        ("x\ny", {"pattern": "^y$", "flags": ["MULTILINE"]}, 1.0),
        ("x\ny", {"pattern": "^y$"}, 0.0),
        ("HELLO", {"pattern": "hello", "flags": ["IGNORECASE"]}, 1.0),
        ("HELLO", {"pattern": "hello"}, 0.0),
        ("é", {"pattern": r"\w", "flags": ["ASCII"]}, 0.0),
        ("ab", {"pattern": "a  b # spaced", "flags": ["VERBOSE"]}, 1.0),
        ("Ü", {"pattern": r"\p{Lu}"}, 1.0),
        ("<think>42</think>no", {"pattern": "42"}, 1.0),
        ("", {"pattern": "^$"}, 1.0),
        (None, {"pattern": "x"}, 0.0),
    ],
)
def test_regex(response, spec, expected):
    assert score(response, {"kind": "regex", **spec}) == expected


@pytest.mark.parametrize(
    ("pattern", "response"),
    [
        ("^(a+)+$", "a" * 60 + "!"),
        ("^(a|aa)+$", "a" * 300 + "!"),
        ("(x+x+)+y", "x" * 3_000),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 5_000),
        (r"^(\w+\s?)*$", "word " * 2_000 + "!"),
        ("(.*)*x", "a" * 5_000),
        (r"\s+$", " " * 300_000 + "x"),
        ("(?s)^(.*?,){25}P", "1," * 5_000),
    ],
)
def test_catastrophic_regex_is_stopped(pattern, response):
    started = time.process_time()
    assert score(response, {"kind": "regex", "pattern": pattern}) == 0.0
    assert time.process_time() - started < 5


def test_stopped_regex_is_marked():
    grader = FormatGrader(spec={"kind": "regex", "pattern": "^(a|aa)+$"}, regex_timeout=0.05)
    assert grade(grader, "a" * 300 + "!") == {"score": 0.0, "regex_timeout": 1.0}
    assert grade(grader, "a" * 300) == 1.0


BAD_PATTERNS = ["(unclosed", "[a-z", "*abc", "a{2,1}", "a**", ")", "\\", "(?P<n", r"\1", "(?z)", "[z-a]", "", None, 3]


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_bad_pattern_is_an_error(pattern):
    spec = {"kind": "regex", "pattern": pattern}
    with pytest.raises(ValueError, match="spec.pattern="):
        FormatGrader(spec=spec)
    with pytest.raises(ValueError, match="spec.pattern="):
        grade(FormatGrader(), "anything", extra_info={"format": spec})


ANSWER = {"kind": "json", "required": ["answer"]}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"answer": null}', 1.0),
        (' \n{"answer": [1, {"a": 2}]}\n', 1.0),
        ('```json\n{"answer": 1}\n```', 1.0),
        ('```JSON  \r\n{"answer": "```"}```\n', 1.0),
        ('{"answer": ' + "9" * 5_000 + "}", 1.0),
        ('{"answer": "\\ud83d\\ude00 \u00e9"}', 1.0),
        ('```\n{"answer": 1}\n```', 0.0),
        ('```json {"answer": 1}```', 0.0),
        ('```json\n{"answer": 1}\n```\n```json\n{"answer": 1}\n```', 0.0),
        ('Here: {"answer": 1}', 0.0),
        ('{"answer": 1} {"answer": 1}', 0.0),
        ('{"answer": 1,}', 0.0),
        ('{"answer": 01}', 0.0),
        ('{"answer": +1}', 0.0),
        ('{"answer": .5}', 0.0),
        ('{"answer": Infinity}', 0.0),
        ('{"answer": [-Infinity]}', 0.0),
        ('{"answer": 1, "answer": 2}', 0.0),
        ('{"answer": {"a": 1, "a": 1}}', 0.0),
        ('{"answer": "a\nb"}', 0.0),
        ('{"answer": 1} // note', 0.0),
        ("{answer: 1}", 0.0),
        ('{"Answer": 1}', 0.0),
        ('{"a": {"answer": 1}}', 0.0),
        ('[{"answer": 1}]', 0.0),
        ('"answer"', 0.0),
        ('{"answer": 1', 0.0),
        ('\ufeff{"answer": 1}', 0.0),
        ("[" * 100_000 + "]" * 100_000, 0.0),
        ('{"answer": ' + "[" * 100_000, 0.0),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, 0.0),
        ("```json", 0.0),
        ("``````", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_json(response, expected):
    assert score(response, ANSWER) == expected


def test_json_after_thinking():
    response = '<think>{"x": 1}</think>\n{"answer": 1}'
    assert score(response, ANSWER) == 0.0
    assert score(response, {**ANSWER, "after_thinking": True}) == 1.0
    assert score('<think>{"answer": 1}', {**ANSWER, "after_thinking": True}) == 0.0


def test_a_row_overrides_the_config():
    grader = FormatGrader(spec=THINK_ANSWER)
    rows = [{}, {"format": {"kind": "regex", "pattern": "^ok$"}}, {"format": None}]
    scores = grader(data_sources=["t"] * 3, solution_strs=["ok"] * 3, ground_truths=[None, 3, "x"], extra_infos=rows)
    assert scores == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, "needs a kind, one of think_answer, regex, json"),
        ("json", "needs a kind"),
        ({"kind": "xml"}, "needs a kind"),
        ({"kind": "json", "require": ["a"]}, r"spec.require: kind json has \['after_thinking', 'required'\]"),
        ({"kind": "json", "required": "answer"}, "spec.required='answer': needs a list of keys"),
        ({"kind": "regex", "pattern": "a", "mode": "match"}, "spec.mode='match': choose search or fullmatch"),
        ({"kind": "regex", "pattern": "a", "flags": ["X"]}, "spec.flags: 'X' is unknown"),
        ({"kind": "regex", "pattern": "a", "flags": "DOTALL"}, "spec.flags='DOTALL': needs a list"),
        ({"kind": "think_answer", "tags": []}, "spec.tags: kind think_answer has no further keys"),
    ],
)
def test_bad_spec_is_named(spec, reason):
    with pytest.raises(ValueError, match=reason):
        FormatGrader(spec=spec)


def test_no_spec_at_all_is_an_error():
    with pytest.raises(ValueError, match='extra_info\\["format"\\]'):
        grade(FormatGrader(), "a", ground_truth="key")
