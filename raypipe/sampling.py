"""Sampling without a learner: one plan over a list of prompts, on the resident actors that a training run has, too.

In: prompts, and how many samples of each. Out: graded rows in the order of the prompts (`sample_files.py` writes them).
Decision: the rows of a large set must fit into memory, so of their lists only the response's tokens and log-probs are
kept, packed: 8 bytes a token.
"""

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import ray

from raypipe.config import Config
from raypipe.console import Console
from raypipe.pipeline import build_plan
from raypipe.plans import Group, group_blocks
from raypipe.prompts import Prompt
from raypipe.residents import ResidentActors, ray_session, sampling_settings
from raypipe.resources import Demand
from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS
from raypipe.sample_files import TOKEN_COLUMNS

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


@contextmanager
def resident_actors(config: Config, demands: Sequence[Demand]) -> Iterator[ResidentActors]:
    """Engines and graders on a Ray of their own, or on the cluster of `RAY_ADDRESS`."""
    # Plans run in this process, where Ray's C++ part would otherwise write to the screen about Ray Data's own actors.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with (
        ray_session(config, sum(demand.count * demand.cpus for demand in demands)),
        ResidentActors(config, demands) as actors,
    ):
        yield actors


def sample_prompts(
    config: Config, prompts: Sequence[Prompt], purpose: str, n: int, actors: ResidentActors, number: int = 0
) -> list[Row]:
    """`n` graded samples of each prompt, prompt by prompt: columns of rows.py but for its lists, of which response_ids
    and engine_logprobs are there packed, and prompt_length and response_length. Shows its progress.

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
            return [row for block in ray.get(plan.to_arrow_refs()) for row in _slim(block)]
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
    """A block's rows. Token ids and log-probs stay packed, as NumPy arrays on the block's memory."""
    lists = {name: batch[name] for name in TOKEN_COLUMNS}
    rows = batch.select(KEPT).to_pylist()
    for i, (row, prompt) in enumerate(zip(rows, batch["prompt_ids"], strict=True)):
        packed = {name: column[i].values.to_numpy() for name, column in lists.items()}
        row |= {"prompt_length": len(prompt), "response_length": len(packed["response_ids"]), **packed}
    return rows
