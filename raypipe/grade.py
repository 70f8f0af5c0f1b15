"""The command `python -m raypipe.grade`: grades the responses of a file through the plan's own Grade stage.

In: a parquet or JSONL file of prompts and responses, and a grader. Out: a summary of scores, statuses and times, and
the file with its grades if asked for. With `--compare-batches` it also times the grader at several `max_batch`, so that
a user can choose one before a run depends on it.

    python -m raypipe.grade --grader graders.math:MathGrader --data samples.parquet --out scored.parquet
"""

import argparse
import asyncio
import contextlib
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

from raypipe.config import Config, GradeConfig, GraderConfig, RunConfig, grader_actors
from raypipe.config_checks import check

Rows = list[dict[str, Any]]
SAMPLES_PER_BLOCK = 16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.grade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grader", required=True, help="package.module:Name or path/to/file.py:name")
    parser.add_argument("--data", required=True, nargs="+", help="parquet or JSONL files of prompts and responses")
    parser.add_argument("--out", help="write every row with its grades here (.parquet or .jsonl)")
    parser.add_argument("--kwargs", default="{}", help="arguments of the grader, as YAML or JSON")
    parser.add_argument("--response", help="column of the response (default: response, completion, output, ...)")
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
    from raypipe.sample_files import check_samples_name, read_generated, write_samples_file

    try:
        config = config_for(options)
        sizes = _sizes(options.compare_batches)
        out = Path(options.out) if options.out else None
        if out:
            check_samples_name(out)
        columns = _mapping("--columns", options.columns)
        rows = read_generated(options.data, columns, options.response or "", options.group_by)
        graded = grade_rows(config, rows)
        report(graded)
        if out:
            write_samples_file(out, graded)
            print(f"wrote {out}")
        compare(config, rows, sizes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def config_for(options: argparse.Namespace) -> Config:
    """The options as a config, checked like a run's."""
    grader = GraderConfig(
        path=options.grader,
        kwargs=_mapping("--kwargs", options.kwargs),
        scope=options.scope,
        max_batch=options.max_batch,
        timeout_s=options.timeout_s,
    )
    return grading_config(grader, options.processes)


def grading_config(grader: GraderConfig, processes: int) -> Config:
    """A config for grading alone. Raises ValueError if there is no such grader, or a value is out of range."""
    from raypipe.adapters import find_grader

    find_grader(grader.path)
    config = Config(run=RunConfig(name="grade"), grade=GradeConfig(graders=[grader], processes=processes))
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


def grade_rows(config: Config, rows: Rows, per_block: int = SAMPLES_PER_BLOCK) -> Rows:
    """`rows` (see `sample_files.generated_rows`) with their GRADE_COLUMNS, in the same order, graded by the plan's
    Grade stage, on a Ray of its own unless there is one."""
    import ray

    from raypipe.console import Console
    from raypipe.grading.dispatcher import start_dispatcher
    from raypipe.pipeline import Workers, build_plan
    from raypipe.residents import ray_session
    from raypipe.sample_files import to_block

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the executor runs in this process
    console = Console(1, config.log.quiet)
    found: dict[str, dict[str, Any]] = {}
    with ray_session(config, cpus=config.grade.processes), contextlib.closing(console):
        dispatcher = start_dispatcher(config.grade, grader_actors(config), "grade", config.grade.processes)
        try:
            ray.get(dispatcher.start.remote())
            workers = Workers([], "grade/grade-dispatcher", grader_actors(config), {})
            blocks = [to_block(rows[first : first + per_block]) for first in range(0, len(rows), per_block)]
            console.start_iteration(0, len(rows))
            for batch in build_plan("grade", blocks, workers, ["grade"]).iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                found |= {row["sample_id"]: row for row in batch.to_pylist()}
                console.progress("graded", len(found))
            ray.get(dispatcher.close.remote())
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
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
    from raypipe.sample_files import to_block

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


if __name__ == "__main__":
    sys.exit(main())
