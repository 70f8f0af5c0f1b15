"""The command that grades a file: what it reads, writes, prints and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.grade import main

ROOT = Path(__file__).parent.parent
FAULTY = ROOT / "tests" / "faulty_graders.py"
ANSWERS = ["\\boxed{42}", "It is 41.", "#### 42", "no idea"]
PROMPT = [{"role": "user", "content": "6*7?"}]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_parquet_file_of_verl_rows_is_graded_and_written_with_its_grades(tmp_path):
    rows = [
        {"data_source": "sums", "prompt": PROMPT, "reward_model": {"ground_truth": "42"}, "response": text}
        for text in ANSWERS * 10
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples.parquet")
    out = tmp_path / "scored.parquet"
    done = subprocess.run(
        [sys.executable, "-m", "raypipe.grade", "--grader", "graders.math:MathGrader", "--out", str(out),
         "--data", str(tmp_path / "samples.parquet"), "--compare-batches", "1,8"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout
    scored = pq.read_table(out).to_pylist()
    assert [row["response"] for row in scored] == ANSWERS * 10
    assert [row["score"] for row in scored] == [1.0, 0.0, 1.0, 0.0] * 10
    assert {row["grade_status"] for row in scored} == {"ok"}
    assert [json.loads(row["prompt"]) for row in scored] == [PROMPT] * 40
    assert {row["ground_truth"] for row in scored} == {"42"}
    assert "40 samples: 40 ok" in printed and "mean 0.5000" in printed and "slowest samples" in printed
    for size in (1, 8):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"max_batch={size} ")]
        assert float(line.split()[1]) > 0


def test_a_jsonl_file_with_failures_is_graded_to_its_end(tmp_path, capsys, ray_session):
    responses = ["fine"] * 5 + ["hang", "segfault", "raise_value_error"] + ["fine"] * 5
    rows = [{"question": f"q{i}", "text": text} for i, text in enumerate(responses)]
    out = tmp_path / "scored.jsonl"
    arguments = [
        "--grader", f"{FAULTY}:Faulty", "--data", write_jsonl(tmp_path / "samples.jsonl", rows), "--out", str(out),
        "--columns", "{prompt: question}", "--response", "text", "--timeout-s", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    statuses = ["ok"] * 5 + ["timeout", "crash", "error"] + ["ok"] * 5
    assert [row["grade_status"] for row in scored] == statuses
    assert [row["score"] for row in scored] == [1.0 if status == "ok" else None for status in statuses]
    assert "13 samples: 10 ok, 1 timeout, 1 crash, 1 error" in printed
    assert "took more than 1 s" in printed and "SIGSEGV" in printed


MATH = ["--grader", "graders.math:MathGrader"]
ROW = {"prompt": "6*7?", "answer": "42", "response": "42"}


@pytest.mark.parametrize(
    ("rows", "arguments", "reasons"),
    [
        ([ROW], ["--grader", "graders.maths:MathGrader"], ["no module 'graders.maths'", "graders has math"]),
        ([ROW], [*MATH, "--out", "x.csv"], ["--out x.csv", ".parquet or .jsonl"]),
        ([ROW], [*MATH, "--out", "no/x.jsonl"], ["--out no/x.jsonl", "no folder no"]),
        ([ROW], [*MATH, "--kwargs", "{a"], ["--kwargs '{a'", "mapping"]),
        ([ROW], [*MATH, "--kwargs", "7"], ["--kwargs '7'", "mapping"]),
        ([ROW], [*MATH, "--compare-batches", "4,x"], ["--compare-batches '4,x'"]),
        ([ROW], [*MATH, "--max-batch", "0"], ["max_batch=0", "at least 1"]),
        ([ROW], [*MATH, "--group-by", "id"], ["samples.jsonl", "1", "'id' (--group-by)"]),
        ([ROW], [*MATH, "--response", "reply"], ["samples.jsonl", "'reply'", "--response"]),
        ([ROW, {"prompt": "?"}], MATH, ["samples.jsonl", "line 2", "no response"]),
        ([{**ROW, "response": 7}], MATH, ["samples.jsonl", "response is 7"]),
        ([{**ROW, "response": "\ud800"}], MATH, ["samples.jsonl", "Unicode text"]),
        ([{"response": "7"}], MATH, ["samples.jsonl", "no prompt"]),
        ([], MATH, ["samples.jsonl"]),
        (None, MATH, ["samples.jsonl"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_anything_starts(tmp_path, monkeypatch, capsys, rows, arguments, reasons):
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        write_jsonl(tmp_path / "samples.jsonl", rows)
    assert main([*arguments, "--data", "samples.jsonl"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    for reason in reasons:
        assert reason in error


def test_a_grader_that_cannot_be_built_is_named_with_its_traceback(tmp_path, capsys, ray_session):
    data = write_jsonl(tmp_path / "samples.jsonl", [ROW])
    assert main(["--grader", f"{FAULTY}:Broken", "--kwargs", "{how: raise}", "--data", data]) == 1
    error = capsys.readouterr().err
    assert "error: the grader 'Broken' could not be built: LookupError: no such model" in error
    assert "faulty_graders.py" in error
