"""Which samples are kept, and that what a model wrote stays data."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.samples import choose, terminal_safe, to_json, write_samples


def row(group: int, member: int, score: float = 0.0, status: str = "ok", **changes) -> dict:
    return {
        "sample_id": f"3/{group}/{member}",
        "iteration": 3,
        "group_id": group,
        "member": member,
        "purpose": "train",
        "prompt_id": f"p{group}",
        "data_source": "sums",
        "prompt_text": "6*7?",
        "prompt_ids": [1, 2, 3],
        "response_text": "42",
        "response_ids": [4, 5],
        "ground_truth": '"42"',
        "extra_info": '{"index": 7}',
        "score": score if status == "ok" else math.nan,
        "grade_status": status,
        "grades": '[{"grader": "math", "status": "ok", "score": 1.0}]',
        "finish_reason": "stop",
        "generate_error": "",
        "advantage": 0.5,
    } | changes


def ids(chosen, kind):
    return [row["sample_id"] for k, row in chosen if k == kind]


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_best_worst_and_failed():
    rows = [row(g, 0, score=g / 10) for g in range(10)]
    rows += [row(10, 0, status="timeout"), row(11, 0, status="abstain"), row(12, 0, status="crash")]
    chosen = choose(rows, 3)
    assert ids(chosen, "best") == ["3/9/0", "3/8/0", "3/7/0"]
    assert ids(chosen, "worst") == ["3/0/0", "3/1/0", "3/2/0"]
    assert ids(chosen, "failed") == ["3/10/0", "3/12/0"]


def test_no_sample_is_best_and_worst():
    assert [(kind, r["score"]) for kind, r in choose([row(g, 0, score=g) for g in range(3)], 4)] == [
        ("best", 2), ("best", 1), ("worst", 0),
    ]  # fmt: skip
    assert [kind for kind, _ in choose([row(0, 0)], 4)] == ["best"]
    assert choose([], 4) == [] and choose([row(0, 0)], 0) == []


def test_equal_scores_are_shown_for_many_prompts():
    rows = [row(g, m, score=1.0) for g in range(4) for m in range(8)]
    assert ids(choose(rows, 4), "best") == ["3/0/0", "3/1/0", "3/2/0", "3/3/0"]
    assert ids(choose(list(reversed(rows)), 4), "best") == ["3/0/0", "3/1/0", "3/2/0", "3/3/0"]


def test_file_holds_what_a_reader_needs_and_heldout_samples_apart(tmp_path):
    path = tmp_path / "it_000003.jsonl"
    write_samples(path, [row(0, 0, 1.0), row(1, 0, purpose="heldout", advantage=None), row(2, 0, status="error")], 4)
    lines = read(path)
    assert lines[0] == {
        "kind": "best",
        "purpose": "train",
        "sample_id": "3/0/0",
        "iteration": 3,
        "prompt_id": "p0",
        "data_source": "sums",
        "prompt": "6*7?",
        "response": "42",
        "ground_truth": "42",
        "extra_info": {"index": 7},
        "score": 1.0,
        "advantage": 0.5,
        "status": "ok",
        "grades": [{"grader": "math", "status": "ok", "score": 1.0}],
        "prompt_length": 3,
        "response_length": 2,
        "finish_reason": "stop",
        "generate_error": "",
    }
    assert [(line["kind"], line["purpose"], line["score"]) for line in lines] == [
        ("best", "train", 1.0), ("failed", "train", None), ("best", "heldout", 0.0),
    ]  # fmt: skip
    assert lines[2]["advantage"] is None


HOSTILE = '\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202egnp.exe\u2028\ud800\U000e0041\x00 \x7f 数 é 👍 "\\ </script>'


def test_hostile_text_is_read_back_unchanged_and_prints_nothing_but_text(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [row(0, 0, response_text=HOSTILE, grades='[{"values": {"x": NaN}}]')], 1)
    raw = path.read_text(encoding="utf-8")
    assert raw.endswith("\n") and raw[:-1].isprintable()
    assert "数 é 👍" in raw
    (line,) = read(path)
    assert line["response"] == HOSTILE
    assert line["grades"] == [{"values": {"x": None}}]


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_safe_on_a_terminal_and_survives_json(text):
    assert terminal_safe(text).isprintable()
    assert to_json(text).isprintable() and json.loads(to_json(text)) == text


@pytest.mark.parametrize(
    "text, safe",
    [
        ("Plain 数 é 👍 [bold]", "Plain 数 é 👍 [bold]"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31mred\x9b", r"\x1b[31mred\x9b"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("\ud83d", r"\ud83d"),
        ("\U000e0041", r"\U000e0041"),
        ("a\xa0b", r"a\xa0b"),
        ("", ""),
    ],
)
def test_terminal_safe(text, safe):
    assert terminal_safe(text) == safe
