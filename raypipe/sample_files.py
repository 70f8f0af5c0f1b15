"""Files of samples: graded rows out, and in again, so that they can be graded by another grader or trained on.

In: rows of the plan, or parquet and JSONL files of prompts and responses from anywhere. Out: such files, and rows that
have been generated. Decision: what is written reads back exactly under the same keys. In JSONL a value stands as
itself. In parquet, where a column has one type, a column of texts is text, and any other is Arrow's JSON type.

Files that raypipe wrote (these, and samples/it_N.jsonl of a run) are known by their columns: their scores and statuses
are results, which are made anew; a file of someone else's may have a column `score` that its grader reads.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.config import DataConfig
from raypipe.prompt_files import FileRow, located, read_rows
from raypipe.prompt_rows import Example, check_rows
from raypipe.rows import GENERATE_COLUMNS, PROMPT_COLUMNS

Row = dict[str, Any]

# Where a response is looked for, unless its column is named.
RESPONSES = ("response", "response_text", "completion", "solution_str", "output")
# Columns of the files that are written; tokens and their log-probs in parquet alone.
FILE_COLUMNS = {
    "sample_id": pa.string(),
    "prompt_id": pa.string(),
    "data_source": pa.string(),
    "member": pa.int64(),
    "prompt": None,
    "response": pa.string(),
    "ground_truth": None,
    "extra_info": pa.string(),
    "score": pa.float64(),
    "grade_status": pa.string(),
    "grades": pa.string(),
    "finish_reason": pa.string(),
    "generate_error": pa.string(),
    "prompt_length": pa.int64(),
    "response_length": pa.int64(),
}
TOKEN_COLUMNS = {"response_ids": pa.list_(pa.int32()), "engine_logprobs": pa.list_(pa.float32())}
# What tells a file of ours, and its columns that are neither the data's nor the response.
OURS = ("sample_id", "grades", "finish_reason")
RESULTS = (
    {*FILE_COLUMNS, *TOKEN_COLUMNS, "kind", "purpose", "iteration", "advantage", "status"}
    - {"prompt", "ground_truth", "data_source", "extra_info", "response"}
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A prompt and a response to it, as a file has them.

    example: the row's prompt and key. response: its text.
    made: what else of GENERATE_COLUMNS the file holds (finish_reason, generate_error; in parquet the tokens), and
        prompt_id and member.
    group: equal for samples of one prompt.
    """

    example: Example
    response: str
    made: Row = field(default_factory=dict)
    group: Any = None


def read_samples(
    rows: Iterable[FileRow], columns: Mapping[str, str], response: str = "", group_by: str = ""
) -> Iterator[Sample]:
    """The prompts and responses of `rows` (see `prompt_files.read_rows`), in order, checked.

    Args:
        columns: as data.columns.
        response: column of the response; empty: the first of RESPONSES.
        group_by: column with the same value for samples of one prompt; empty: their prompts are equal.

    Raises:
        ValueError: a bad row; the message names the file and line.
    """
    data = DataConfig(columns=dict(columns), require_ground_truth=False)
    wanted = [response] if response else list(RESPONSES)
    for row in rows:
        with located(row.place):
            values = dict(row.values)
            column = next((name for name in wanted if name in values), None)
            if column is None:
                raise ValueError(
                    f"no response in the columns {wanted}, found {sorted(values)}; name it with --response"
                )
            if group_by and group_by not in values:
                raise ValueError(f"no column {group_by!r} (--group-by), found {sorted(values)}")
            text = values.pop(column)
            if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError(f"{column} is {text!r}; a response is Unicode text")
        made: Row = {}
        if all(name in values for name in OURS):
            made = {name: values.pop(name) for name in RESULTS & values.keys()}
        (example,) = check_rows([FileRow(row.place, row.default_id, values)], data)
        group = values[group_by] if group_by else made.get("prompt_id", json.dumps(example.prompt))
        yield Sample(example, text, made, group)


def read_generated(files: list[str], columns: Mapping[str, str], response: str = "", group_by: str = "") -> list[Row]:
    """The rows of `files` as samples that have been generated; `to_block` makes a block of them.

    Raises:
        ValueError: a bad file or row, see `read_samples`.
    """
    return generated_rows(read_samples(read_rows(files, ""), columns, response, group_by))


def generated_rows(samples: Iterable[Sample]) -> list[Row]:
    """Samples by the names of PROMPT_COLUMNS and GENERATE_COLUMNS, what grading does not look at left out."""
    rows: list[Row] = []
    groups: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        example = sample.example
        groups.setdefault(json.dumps(sample.group, default=str), []).append(number)
        kept = {name: sample.made[name] for name in ("finish_reason", "generate_error") if sample.made.get(name)}
        tokens = {name: sample.made[name] for name in TOKEN_COLUMNS if sample.made.get(name) is not None}
        rows.append(
            {
                "sample_id": example.prompt_id,
                "prompt_id": sample.made.get("prompt_id", example.prompt_id),
                "data_source": example.data_source,
                "prompt": json.dumps(example.prompt),
                "prompt_text": example.prompt if isinstance(example.prompt, str) else json.dumps(example.prompt),
                "response_text": sample.response,
                "ground_truth": example.ground_truth,
                "extra_info": example.extra_info,
                **kept,
                **tokens,
            }
        )
    for group_id, members in enumerate(groups.values()):
        for member, number in enumerate(members):
            rows[number] |= {"group_id": group_id, "member": member, "group_size": len(members)}
    return rows


def to_block(rows: Sequence[Row]) -> pa.Table:
    """Rows as one block that the Grade stage takes; what they lack is empty."""
    fill: Row = {"prompt": '""', "purpose": "train", "prompt_id": "", "generate_error": "", "finish_reason": "stop",
                 "engine": "", "reserve": -1}  # fmt: skip
    columns = {**PROMPT_COLUMNS, **GENERATE_COLUMNS}
    empty = {name: [] if pa.types.is_list(dtype) else fill.get(name, 0) for name, dtype in columns.items()}
    complete = [empty | {"generate_start": time.time(), "generate_end": time.time()} | row for row in rows]
    return pa.table({name: pa.array([row[name] for row in complete], dtype) for name, dtype in columns.items()})


def check_samples_name(path: Path) -> None:
    """Raises ValueError unless `write_samples_file` can write to `path`."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out {path}: the name must end in .parquet or .jsonl")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")


def write_samples_file(path: Path, rows: Sequence[Row]) -> None:
    """Writes FILE_COLUMNS of `rows` to a .parquet or .jsonl file; in parquet also their tokens and log-probs.

    Prompt and ground truth stand there as the data has them. A score that is none (see grade_status) is null.
    """
    lines = [_line(row) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return
    for line in lines:
        line["extra_info"] = json.dumps(line["extra_info"])
    columns = {name: _array([line[name] for line in lines], dtype) for name, dtype in FILE_COLUMNS.items()}
    for name, dtype in TOKEN_COLUMNS.items():
        if all(name in row for row in rows):
            columns[name] = pa.array([row[name] for row in rows], dtype)
    pq.write_table(pa.table(columns), path)


def _line(row: Row) -> Row:
    lengths = {f"{name}_length": len(row[f"{name}_ids"]) for name in ("prompt", "response") if f"{name}_ids" in row}
    return {name: (row | lengths).get(name) for name in FILE_COLUMNS} | {
        "prompt": json.loads(row["prompt"]),
        "response": row["response_text"],
        "ground_truth": json.loads(row["ground_truth"]),
        "extra_info": json.loads(row["extra_info"]),
        "score": row["score"] if math.isfinite(row["score"]) else None,
    }


def _array(values: list[Any], dtype: pa.DataType | None) -> pa.Array:
    if dtype is not None or all(value is None or _is_text(value) for value in values):
        return pa.array(values, dtype or pa.string())
    texts = pa.array([None if value is None else json.dumps(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


def _is_text(value: Any) -> bool:
    """Text that Arrow can hold: JSON text may hold halves of surrogate pairs, too."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
