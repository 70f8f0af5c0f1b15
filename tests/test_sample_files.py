"""Files of samples read back as they were written, under the same keys, and files of others as they are."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_runs import simulated_run

from raypipe.rows import GRADE_READS
from raypipe.sample_files import read_generated, to_block, write_samples_file

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "6*7?"}]
BOTH = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])


def row(group: int, member: int, **more) -> dict:
    return {
        "sample_id": f"0/{group}/{member}", "group_id": group, "member": member, "prompt_id": f"p{group}",
        "data_source": "sums", "prompt": '"6*7?"', "prompt_text": "<|user|>6*7?", "response_text": "42",
        "ground_truth": '"42"', "extra_info": '{"index": 1}', "score": 1.0, "grade_status": "ok",
        "grades": json.dumps([{"grader": "g", "status": "ok", "score": 1.0, "values": {}}]),
        "finish_reason": "stop", "generate_error": "", "prompt_length": 3, "response_length": 1, **more,
    }  # fmt: skip


def again(path: Path, rows: list[dict]) -> list[dict]:
    write_samples_file(path, rows)
    return read_generated([str(path)], {})


@BOTH
def test_what_is_written_reads_back(suffix, tmp_path):
    rows = [
        row(0, 0, ground_truth='"007"', prompt=json.dumps(MESSAGES)),
        row(0, 1, score=math.nan, grade_status="crash", prompt=json.dumps(MESSAGES), response_text="\u202e\x00<b>"),
        row(1, 0, ground_truth='{"tests": [1, null, "\\ud800"]}', extra_info='{"score": 3, "grades": null}'),
        row(2, 0, ground_truth="null", finish_reason="failed", generate_error="engine-0: gone", response_text=""),
        row(3, 0, ground_truth="4.5"),
    ]
    back = again(tmp_path / f"s{suffix}", rows)
    for name in ("prompt_id", "data_source", "prompt", "ground_truth", "extra_info", "response_text", "member"):
        assert [r[name] for r in back] == [r[name] for r in rows], name
    assert [r["group_size"] for r in back] == [2, 2, 1, 1, 1]
    assert back[3]["finish_reason"] == "failed" and back[3]["generate_error"] == "engine-0: gone"
    written = again(
        tmp_path / f"again{suffix}", [r | {"score": 0.0, "grade_status": "ok", "grades": "[]"} for r in back]
    )
    assert [{k: v for k, v in r.items() if k != "sample_id"} for r in written] == [
        {k: v for k, v in r.items() if k != "sample_id"} for r in back
    ]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(truths=st.lists(json_values, min_size=1, max_size=4), suffix=st.sampled_from([".parquet", ".jsonl"]))
def test_any_ground_truths_read_back(truths, suffix, tmp_path):
    rows = [row(i, 0, ground_truth=json.dumps(truth)) for i, truth in enumerate(truths)]
    back = again(tmp_path / f"s{suffix}", rows)
    assert [json.loads(r["ground_truth"]) for r in back] == truths


def test_tokens_stay_in_parquet(tmp_path):
    tokens = {"response_ids": np.array([5, 6], np.int32), "engine_logprobs": np.array([-0.5, -1.25], np.float32)}
    (back,) = again(tmp_path / "s.parquet", [row(0, 0, **tokens)])
    assert back["response_ids"] == [5, 6] and back["engine_logprobs"] == [-0.5, -1.25]
    (back,) = again(tmp_path / "s.jsonl", [row(0, 0, **tokens)])
    assert "response_ids" not in back


def test_texts_are_a_plain_column_and_other_values_json(tmp_path):
    write_samples_file(tmp_path / "s.parquet", [row(0, 0), row(1, 0)])
    assert pq.read_table(tmp_path / "s.parquet")["ground_truth"].to_pylist() == ["42", "42"]
    write_samples_file(tmp_path / "s.parquet", [row(0, 0), row(1, 0, ground_truth="[1]")])
    table = pq.read_table(tmp_path / "s.parquet")
    assert isinstance(table.schema.field("ground_truth").type, pa.JsonType)
    assert table["prompt"].to_pylist() == ["6*7?", "6*7?"]


def test_the_samples_of_a_run_folder_are_read_with_their_keys(tmp_path):
    run = simulated_run(tmp_path / "run", iterations=2)
    lines = [json.loads(line) for line in run.samples(1).read_text().splitlines()]
    back = read_generated([str(run.samples(1))], {})
    assert [r["response_text"] for r in back] == [line["response"] for line in lines]
    assert [json.loads(r["ground_truth"]) for r in back] == [line["ground_truth"] for line in lines]
    assert all(json.loads(r["extra_info"]) == line["extra_info"] for r, line in zip(back, lines, strict=True))
    assert set(GRADE_READS) <= set(to_block(back).column_names)


def test_a_file_of_someone_elses_keeps_its_columns(tmp_path):
    line = {"prompt": "p", "response": "r", "score": 3, "sample_id": "x", "difficulty": "hard"}
    (tmp_path / "theirs.jsonl").write_text(json.dumps(line) + "\n")
    (back,) = read_generated([str(tmp_path / "theirs.jsonl")], {})
    assert json.loads(back["extra_info"]) == {"score": 3, "sample_id": "x", "difficulty": "hard"}
