"""Sampling without a learner: one plan over a list of prompts, on the resident actors that a training run has, too.

In: prompts, and how many samples of each. Out: graded rows in the order of the prompts, and a file of them. Decision:
the rows of a large set must fit into memory, so token ids and log-probs are dropped on arrival and their number is
kept. The file can be graded again (`raypipe.grade`): its columns have the names of simple rows, and `response`.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from raypipe.config import Config
from raypipe.console import Console
from raypipe.pipeline import build_plan
from raypipe.plans import Group, group_blocks
from raypipe.prompts import Prompt
from raypipe.resources import Demand
from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS
from raypipe.runtime import ResidentActors, sampling_settings, start_ray

Row = dict[str, Any]

# A plan has all its blocks in work at once. More prompts than this are sampled in several plans, two at a time, so that
# one fills the tail of the other.
PROMPTS_PER_PLAN = 256
PLANS_AT_ONCE = 2
PROGRESS_S = 0.5
KEPT = [
    name
    for name, dtype in {**PROMPT_COLUMNS, **GENERATE_COLUMNS, **GRADE_COLUMNS}.items()
    if not pa.types.is_list(dtype)
]
# Columns of the file.
FILE_COLUMNS = {
    "sample_id": pa.string(),
    "prompt_id": pa.string(),
    "data_source": pa.string(),
    "member": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    "ground_truth": pa.string(),
    "extra_info": pa.string(),
    "score": pa.float64(),
    "grade_status": pa.string(),
    "grades": pa.string(),
    "finish_reason": pa.string(),
    "generate_error": pa.string(),
    "prompt_length": pa.int64(),
    "response_length": pa.int64(),
}


@contextmanager
def resident_actors(config: Config, demands: Sequence[Demand]) -> Iterator[ResidentActors]:
    """Engines and graders on a Ray of their own, or on the cluster of `RAY_ADDRESS`."""
    # Plans run in this process, where Ray's C++ part would otherwise write to the screen about Ray Data's own actors.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    start_ray(config, sum(demand.count * demand.cpus for demand in demands))
    try:
        with ResidentActors(config, demands) as actors:
            yield actors
    finally:
        ray.shutdown()


def sample_prompts(
    config: Config, prompts: Sequence[Prompt], purpose: str, n: int, actors: ResidentActors, number: int = 0
) -> list[Row]:
    """`n` graded samples of each prompt, prompt by prompt: columns of rows.py but for its lists, of which prompt_ids
    and response_ids are there as prompt_length and response_length. Shows its progress.

    Args:
        config: its sampling settings hold, whatever `actors` were started with.
        purpose: train or heldout: which of them.
        number: of the pass, where one set of actors makes several; stands in the place of the iteration.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the executor runs in this process
    workers = dataclasses.replace(actors.workers, sampling=sampling_settings(config))
    blocks = [
        block
        for group_id, prompt in enumerate(prompts)
        for block in group_blocks(Group(number, group_id, prompt, purpose, n, 0), n, config.run.seed)
    ]
    actors.wait_for_engines()
    console = Console(1, config.log.quiet, stages=("generated", "graded"))
    console.start_iteration(0, len(prompts) * n)
    before = actors.counts()

    def run(first: int) -> list[Row]:
        name = f"{config.run.name}.{purpose}.{number:06d}.{first // PROMPTS_PER_PLAN}"
        plan = build_plan(name, blocks[first : first + PROMPTS_PER_PLAN], workers)
        try:
            batches = plan.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
            return [row for batch in batches for row in _slim(batch)]
        finally:
            actors.dispatcher.forget.remote(name)

    pool = ThreadPoolExecutor(PLANS_AT_ONCE)
    try:
        plans = [pool.submit(run, first) for first in range(0, len(blocks), PROMPTS_PER_PLAN)]
        waiting: set[Future[list[Row]]] = set(plans)
        while waiting:
            done, waiting = wait(waiting, PROGRESS_S, return_when=FIRST_EXCEPTION)
            for plan in done:
                plan.result()  # raises what the plan raised
            for stage, count in actors.counts().items():
                console.progress(stage, count - before.get(stage, 0))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a plan that still runs ends with its actors
        console.close()
    return sorted((row for plan in plans for row in plan.result()), key=lambda row: (row["group_id"], row["member"]))


def _slim(batch: pa.Table) -> list[Row]:
    lengths = [
        {"prompt_length": len(prompt), "response_length": len(response)}
        for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True)
    ]
    return [row | more for row, more in zip(batch.select(KEPT).to_pylist(), lengths, strict=True)]


def write_samples_file(path: Path, rows: Sequence[Row]) -> None:
    """Writes FILE_COLUMNS of `rows` to a .parquet or .jsonl file.

    A ground truth that is text stands there as it is. Any other stands in JSONL as itself and in parquet, where a
    column has one type, as JSON. A score that is none (see grade_status) is null.
    """
    lines = [_line(row) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return
    for line in lines:
        if not isinstance(line["ground_truth"], str | None):
            line["ground_truth"] = json.dumps(line["ground_truth"])
        line["extra_info"] = json.dumps(line["extra_info"])
    columns = {name: pa.array([line[name] for line in lines], dtype) for name, dtype in FILE_COLUMNS.items()}
    pq.write_table(pa.table(columns), path)


def _line(row: Row) -> Row:
    return {name: row[name] for name in FILE_COLUMNS if name in row} | {
        "prompt": row["prompt_text"],
        "response": row["response_text"],
        "ground_truth": json.loads(row["ground_truth"]),
        "extra_info": json.loads(row["extra_info"]),
        "score": row["score"] if math.isfinite(row["score"]) else None,
    }
