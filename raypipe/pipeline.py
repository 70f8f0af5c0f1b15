"""The plan: one PPO iteration as one Ray Data streaming execution.

    prompts ──► Generate ──► Grade ──► Score ──► streaming_split ──► one iterator per learner rank
    (blocks)    engines      graders   scorers      (and behind each of them the user's own stages)

In: an iteration's prompt rows. Out: graded rows. A block leaves a Ray Data task only when the task ends, so a block of
`rollout.samples_per_block` samples is one task, and no stage rebundles. By default that is a prompt's whole group: the
learner can use none of its samples before the last, and a block costs Ray more than 12 ms of CPU, whatever it holds.
Grading does not wait for blocks: Generate tells the grade dispatcher of each sample at once. This file makes the
project's only `map_batches` calls.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.execution_callback import ExecutionCallback

# Keeps the blocks as they are; from_items would split the rows anew, from_arrow runs a Ray task for each block.
from ray.data.read_api import from_blocks

from raypipe.config import StageConfig, stage_name
from raypipe.plan_process import PlanRows
from raypipe.stages.generate import Generate
from raypipe.stages.grade import Grade
from raypipe.stages.own import labelled
from raypipe.stages.score import Score

# Seconds that the executor sleeps in each turn while any task is unfinished, here always. Ray's wait adds as much to
# each hop of a block, so a plan has a shorter one while blocks move.
RAY_WAIT_S, SHORT_WAIT_S = 0.1, 0.01
# A turn looks at every block in flight. The executor rests this many times as long as a turn has taken, so that a plan
# of a thousand blocks takes a tenth of a core and not a whole one.
REST = 9
# Seconds without a move after which a plan counts as waiting, at the gate or for a straggler.
STILL_S = 0.25
# Blocks that each actor of a scaled Grade pool works on; Ray Data adds actors while they have this many and more wait.
BLOCKS_PER_SCALED_ACTOR = 64
_WAIT = "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S"


class ShortWait(ExecutionCallback):
    """Shortens the executor's wait while blocks move, in the process that hosts it and this one plan.

    The wait is a private constant; it is left alone where it is gone.
    """

    moves, moved, worked = 0, 0.0, 0.0

    def on_execution_step(self, executor: Any) -> None:
        if not hasattr(streaming_executor_state, _WAIT):
            return
        metrics = [operator.metrics for operator in executor._topology]
        moves = sum(metric.num_tasks_submitted + metric.num_task_outputs_generated for metric in metrics)
        if moves != self.moves:
            self.moves, self.moved = moves, time.monotonic()
        still = time.monotonic() - self.moved > STILL_S
        turn, self.worked = time.thread_time() - self.worked, time.thread_time()
        short = min(RAY_WAIT_S, max(SHORT_WAIT_S, REST * turn))
        setattr(streaming_executor_state, _WAIT, RAY_WAIT_S if still else short)


@dataclass(frozen=True)
class Workers:
    """The resident actors that the stages of every plan of a run call, by name, and how wide the plan is.

    engines: names of engine actors.
    dispatcher: name of the grade dispatcher actor.
    grade_actors: (fewest, most) grader hosts; where they differ, Ray Data scales as many Grade actors in between.
    sampling: sampling settings by row purpose (see `Generate`).
    scorers: names of scorer actors by role (see `Score`); without any the plan has no Score stage.
    reserve: name of the actor that says which prompts in reserve are needed; empty: plans have no reserve.
    stages: the user's own stages (pipeline.stages).
    """

    engines: list[str]
    dispatcher: str
    grade_actors: tuple[int, int]
    sampling: dict[str, dict[str, Any]]
    scorers: dict[str, list[str]] = field(default_factory=dict)
    reserve: str = ""
    stages: list[StageConfig] = field(default_factory=list)


def build_plan(
    name: str, blocks: list[pa.Table], workers: Workers, stages: Sequence[str] = ("generate", "grade", "score")
) -> Dataset:
    """The streaming plan over `blocks` (tables of PROMPT_COLUMNS, one block each), named for the dashboard.

    Args:
        stages: a part of the plan alone; its blocks have the columns of the stages before it already.
    """
    set_context(DataContext.get_current())
    rows = from_blocks(blocks)
    for stage in stages:
        rows = STAGES[stage](rows, name, len(blocks), workers)
        for own in workers.stages:
            if own.after == stage:
                rows = add_own(rows, len(blocks), own)
    rows.set_name(name)
    return rows


def generate(prompts: Dataset, name: str, blocks: int, workers: Workers) -> Dataset:
    """Adds the Generate stage to `prompts`, which has `blocks` blocks."""
    return prompts.map_batches(
        Generate,
        fn_constructor_kwargs={
            "engines": workers.engines,
            "plan": name,
            "sampling": workers.sampling,
            "listener": workers.dispatcher,
            "reserve": workers.reserve,
        },
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        # Every block may be at the engines at once: they have the queue, and the gate.
        compute=ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=blocks, max_tasks_in_flight_per_actor=blocks),
    )


def grade(generated: Dataset, name: str, blocks: int, workers: Workers) -> Dataset:
    """Adds the Grade stage to `generated`, which has `blocks` blocks."""
    fewest, most = workers.grade_actors
    # Where the number of grader hosts is fixed, one actor takes every block at once: the dispatcher has the queue, and
    # each further actor would cost its start in every plan. A pool that Ray Data is to scale, hosts with it, must show
    # it a load, a queue that is longer than what its actors take.
    is_fixed = fewest == most
    concurrent = blocks if is_fixed else min(blocks, BLOCKS_PER_SCALED_ACTOR)
    return generated.map_batches(
        Grade,
        fn_constructor_kwargs={"dispatcher": workers.dispatcher, "plan": name, "reserve": workers.reserve},
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        compute=ActorPoolStrategy(
            min_size=1 if is_fixed else fewest,
            max_size=1 if is_fixed else most,
            max_concurrent_calls_per_actor=concurrent,
            max_tasks_in_flight_per_actor=2 * concurrent,
        ),
    )


def score(graded: Dataset, name: str, blocks: int, workers: Workers) -> Dataset:
    """Adds the Score stage to `graded`, which has `blocks` blocks, if there are scorers."""
    if not workers.scorers:
        return graded
    return graded.map_batches(
        Score,
        fn_constructor_kwargs={"scorers": workers.scorers},
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        compute=ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=blocks, max_tasks_in_flight_per_actor=blocks),
    )


def add_own(rows: Dataset, blocks: int, stage: StageConfig) -> Dataset:
    """Adds one of the user's stages to `rows`, which has `blocks` blocks."""
    return rows.map_batches(
        labelled(stage_name(stage)),
        fn_constructor_kwargs={"path": stage.path, "kwargs": stage.kwargs},
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        compute=ActorPoolStrategy(
            size=stage.actors, max_concurrent_calls_per_actor=blocks, max_tasks_in_flight_per_actor=blocks
        ),
    )


STAGES = {"generate": generate, "grade": grade, "score": score}


def set_context(context: DataContext) -> None:
    """Makes Ray Data stream one block at a time without waiting, dropping or giving up."""
    context.target_max_block_size = None  # one block per task
    context.execution_options.preserve_order = False  # a finished block never waits for an earlier one
    context.execution_no_progress_timeout_s = -1  # a plan may wait at the gate for as long as training takes
    context.downstream_capacity_backpressure_ratio = None
    # Stages ask for no resources and all blocks may be in flight at once: budgets would hold nothing back, and are a
    # quarter of what a turn costs the executor.
    context.op_resource_reservation_enabled = False
    context.max_errored_blocks = 0  # nothing is dropped silently
    context.memory_usage_poll_interval_s = None  # else each block in a stage has a thread that reads the memory in use
    own = [callback for callback in (ShortWait, PlanRows) if callback not in context.custom_execution_callback_classes]
    context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, *own]
    context.enable_progress_bars = False
    context.print_on_execution_start = False
