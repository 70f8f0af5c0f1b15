"""The command `python -m raypipe.grade`: grades the responses of a file through the plan's own Grade stage.

In: a parquet or JSONL file of prompts and responses, and a grader. Out: a summary of scores, statuses and times, and
the file with its grades if asked for. With `--compare-batches` it also times the grader at several `max_batch`, so that
a user can choose one before a run depends on it.

    python -m raypipe.grade --grader graders.math:MathGrader --data samples.parquet --out scored.parquet
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from raypipe.config import Config, DataConfig, GradeConfig, GraderConfig, RunConfig, grader_actors
from raypipe.config_checks import check

Rows = list[dict[str, Any]]
# Where a response is looked for, unless --response names the column.
RESPONSES = ("response", "response_text", "completion", "solution_str", "output")
SAMPLES_PER_BLOCK = 16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.grade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grader", required=True, help="package.module:Name or path/to/file.py:name")
    parser.add_argument("--data", required=True, nargs="+", help="parquet or JSONL files of prompts and responses")
    parser.add_argument("--out", help="write every row with its grades here (.parquet or .jsonl)")
    parser.add_argument("--kwargs", default="{}", help="arguments of the grader, as YAML or JSON")
    parser.add_argument("--response", help=f"column of the response (default: the first of {', '.join(RESPONSES)})")
    parser.add_argument("--columns", default="{}", help="other columns of other names, e.g. '{prompt: input}'")
    parser.add_argument("--group-by", default="", help="column with the same value for samples of one prompt")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)"
    )
    parser.add_argument("--max-batch", type=int, default=16, help="most samples in one call")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="seconds that a sample may take")
    parser.add_argument("--scope", choices=("sample", "group"), default="sample", help="what the grader sees at once")
    parser.add_argument("--compare-batches", default="", metavar="1,4,16", help="time the grader at these max_batch")
    options = parser.parse_args(arguments)
    try:
        config = config_for(options)
        sizes = _sizes(options.compare_batches)
        out = _out_file(options.out)
        rows = read(options)
        graded = grade_rows(config, rows)
        report(graded)
        if out:
            write(out, graded)
        compare(config, rows, sizes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def config_for(options: argparse.Namespace) -> Config:
    """The options as a config, checked like a run's."""
    from raypipe.adapters import find_grader

    find_grader(options.grader)
    grader = GraderConfig(
        path=options.grader,
        kwargs=_mapping("--kwargs", options.kwargs),
        scope=options.scope,
        max_batch=options.max_batch,
        timeout_s=options.timeout_s,
    )
    config = Config(
        run=RunConfig(name="grade"),
        data=DataConfig(
            train_files=list(options.data), columns=_mapping("--columns", options.columns), require_ground_truth=False
        ),
        grade=GradeConfig(graders=[grader], processes=options.processes),
    )
    check(config)
    return config


def _mapping(option: str, text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text!r} must be a mapping in YAML or JSON, e.g. {{name: value}}")
    return value


def _sizes(text: str) -> list[int]:
    sizes = text.split(",") if text else []
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--compare-batches {text!r} must be numbers of samples from 1, e.g. 1,4,16")
    return [int(size) for size in sizes]


def _out_file(name: str | None) -> Path | None:
    if not name:
        return None
    path = Path(name)
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out {name}: the name must end in .parquet or .jsonl")
    if not path.parent.is_dir():
        raise ValueError(f"--out {name}: there is no folder {path.parent}; make it first")
    return path


def read(options: argparse.Namespace) -> Rows:
    """The file's rows as samples that have been generated (PROMPT_COLUMNS and GENERATE_COLUMNS)."""
    from raypipe.prompt_rows import read_examples

    data = DataConfig(columns=_mapping("--columns", options.columns), require_ground_truth=False)
    rows: Rows = []
    groups: dict[Any, list[int]] = {}
    for number, example in enumerate(read_examples(options.data, data, "")):
        extra = json.loads(example.extra_info)
        wanted = [options.response] if options.response else RESPONSES
        column = next((name for name in wanted if name in extra), None)
        if column is None:
            raise ValueError(
                f"{example.place}: no response in the columns {wanted}, found {sorted(extra)}; name it with --response"
            )
        text = extra.pop(column)
        if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"{example.place}: {column} is {text!r}; a response is Unicode text")
        prompt = example.prompt if isinstance(example.prompt, str) else json.dumps(example.prompt)
        if options.group_by and options.group_by not in extra:
            raise ValueError(f"{example.place}: no column {options.group_by!r} (--group-by), found {sorted(extra)}")
        groups.setdefault(extra[options.group_by] if options.group_by else prompt, []).append(number)
        rows.append(
            {
                "sample_id": example.prompt_id,
                "data_source": example.data_source,
                "prompt": json.dumps(example.prompt),
                "prompt_text": prompt,
                "response_text": text,
                "ground_truth": example.ground_truth,
                "extra_info": json.dumps(extra),
            }
        )
    for group_id, members in enumerate(groups.values()):
        for member, number in enumerate(members):
            rows[number] |= {"group_id": group_id, "member": member, "group_size": len(members)}
    return rows


def to_block(rows: Rows) -> Any:
    """Rows as one block that the Grade stage takes; what grading does not look at is empty."""
    import pyarrow as pa

    from raypipe.rows import GENERATE_COLUMNS, PROMPT_COLUMNS

    fill: dict[str, Any] = {
        "prompt": '""',
        "purpose": "train",
        "prompt_id": "",
        "generate_error": "",
        "finish_reason": "stop",
        "engine": "",
    }
    columns = {**PROMPT_COLUMNS, **GENERATE_COLUMNS}
    empty = {name: [] if pa.types.is_list(dtype) else fill.get(name, 0) for name, dtype in columns.items()}
    complete = [empty | {"generate_start": time.time(), "generate_end": time.time()} | row for row in rows]
    return pa.table({name: pa.array([row[name] for row in complete], dtype) for name, dtype in columns.items()})


def grade_rows(config: Config, rows: Rows, per_block: int = SAMPLES_PER_BLOCK) -> Rows:
    """`rows` with their GRADE_COLUMNS, in the same order, graded by the plan's Grade stage on a Ray of its own."""
    import ray

    from raypipe.console import Console
    from raypipe.grading.dispatcher import start_dispatcher
    from raypipe.pipeline import Workers, build_grading_plan
    from raypipe.runtime import start_ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the executor runs in this process
    start_ray(config, cpus=config.grade.processes)
    console = Console(1)
    try:
        dispatcher = start_dispatcher(config.grade, grader_actors(config), "grade", config.grade.processes)
        try:
            ray.get(dispatcher.start.remote())
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        workers = Workers([], "grade/grade-dispatcher", grader_actors(config), {})
        blocks = [to_block(rows[first : first + per_block]) for first in range(0, len(rows), per_block)]
        found: dict[str, dict[str, Any]] = {}
        console.start_iteration(0, len(rows))
        for batch in build_grading_plan("grade", blocks, workers).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        ):
            found |= {row["sample_id"]: row for row in batch.to_pylist()}
            console.progress("graded", len(found))
        ray.get(dispatcher.close.remote())
    finally:
        console.close()
        ray.shutdown()
    return [found[row["sample_id"]] for row in rows]


def report(rows: Rows) -> None:
    """Prints scores, statuses, times and the slowest samples."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from raypipe.samples import terminal_safe

    screen = Console()
    details = [json.loads(row["grades"])[0] if json.loads(row["grades"]) else {} for row in rows]
    seconds = np.array([detail.get("seconds", 0.0) / max(1, detail.get("batch", 1)) for detail in details])
    scores = np.array([row["score"] for row in rows if row["grade_status"] == "ok"])
    statuses = Counter(row["grade_status"] for row in rows)
    screen.print(f"{len(rows)} samples: " + ", ".join(f"{count} {status}" for status, count in statuses.most_common()))
    if len(scores):
        bins = Counter(round(float(score), 2) for score in scores)
        common = ", ".join(f"{score:g}: {count}" for score, count in bins.most_common(5))
        screen.print(f"score: mean {scores.mean():.4f}, min {scores.min():g}, max {scores.max():g}; commonest {common}")
    p50, p95 = np.percentile(seconds, [50, 95]) * 1000
    screen.print(f"time a sample: mean {seconds.mean() * 1000:.2f} ms, p50 {p50:.2f} ms, p95 {p95:.2f} ms")
    table = Table("sample", "ms", "status", "score", "response", title="slowest samples", title_justify="left")
    for i in np.argsort(-seconds)[:5]:
        text = terminal_safe(rows[i]["response_text"])[:60]
        score, status = rows[i]["score"], rows[i]["grade_status"]
        name = terminal_safe(rows[i]["sample_id"])
        table.add_row(Text(name), f"{seconds[i] * 1000:.1f}", status, f"{score:g}", Text(text))
    screen.print(table)
    errors = Counter(detail["error"].splitlines()[-1] for detail in details if detail.get("error"))
    for error, count in errors.most_common(3):
        screen.print(f"{count} x {terminal_safe(error)}", markup=False, highlight=False)


def compare(config: Config, rows: Rows, sizes: list[int]) -> None:
    """Prints samples a second of the grader at each `max_batch`, all queued at once, after a first call to warm up."""
    from raypipe.grading.pool import GradingPool
    from raypipe.rows import to_grade

    async def measure(size: int) -> float:
        graders = [dataclasses.replace(grader, max_batch=size) for grader in config.grade.graders]
        pool = GradingPool(graders, config.grade.processes, config.grade.memory_mb)
        await pool.start()
        samples = [to_grade(row, "") for row in to_block(rows).to_pylist()]
        await asyncio.gather(*(pool.grade(sample | {"iteration": -1}) for sample in samples[: config.grade.processes]))
        begin = time.perf_counter()
        await asyncio.gather(*map(pool.grade, samples))
        took = time.perf_counter() - begin
        await pool.close()
        return len(samples) / took

    for size in sizes:
        print(
            f"max_batch={size:<4} {asyncio.run(measure(size)):10.1f} samples/s with {config.grade.processes} processes"
        )


def write(path: Path, rows: Rows) -> None:
    """Writes prompt, response, keys and grades of every row to a .parquet or .jsonl file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("sample_id", "data_source", "prompt_text", "response_text", "ground_truth", "extra_info", "score",
             "grade_status", "grades")  # fmt: skip
    kept = [{name: row[name] for name in names} for row in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(kept), path)
    else:
        none_for_nan = [row | {"score": row["score"] if row["grade_status"] == "ok" else None} for row in kept]
        path.write_text("".join(json.dumps(row) + "\n" for row in none_for_nan))
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
