"""The plan server: makes each iteration's plan once, and hands its split iterators to the learner ranks.

In: prompts, and requests for (iteration, attempt, rank). Out: one iterator per rank. What an iteration contains follows
from its number alone (the prompt order is a function of the seed and a cursor), so a plan can be made again after any
failure and asks for the same prompts; the order in which they start alone follows from the past (`lengths.py`). When
the learner group starts again (attempts.py) the plans of earlier attempts are aborted at the engines, so nothing is
generated for ranks that are gone. A plan that is over, or abandoned, is forgotten by the grade dispatcher.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.data import DataIterator
from ray.util.placement_group import PlacementGroup

from raypipe.attempts import Attempts, Told
from raypipe.carry import left_by, planned
from raypipe.config import Config, is_eval, reserve_size
from raypipe.lengths import ResponseLengths, longest_first
from raypipe.pipeline import Workers, build_plan
from raypipe.plan_process import end_execution
from raypipe.prompts import Prompt, PromptOrder
from raypipe.rows import PLACE, PROMPT_COLUMNS, SAVED


def start_plan_server(config: Config, train: list[Prompt], heldout: list[Prompt], workers: Workers) -> Any:
    """Starts the actor `{run}/plans`, which Ray starts again if it dies."""
    # As bytes, since Ray warns of actors that restart with references among their arguments: they are lost with their
    # owner. Here that is the driver, with which all ends, and a pickled reference keeps its object.
    prompts = ray.cloudpickle.dumps(ray.put((train, heldout)))
    actor: Any = ray.remote(PlanServer)
    return actor.options(
        name=f"{config.run.name}/plans", num_cpus=0, max_restarts=-1, max_task_retries=-1,
        max_concurrency=6 * config.train.ranks + 8,
    ).remote(config, prompts, workers)  # fmt: skip


@dataclass
class Plan:
    name: str
    iterators: list[Any]  # of streaming_split, one a rank


class PlanServer:
    """A threaded Ray actor; the learner's ranks call `iterator` at the same time.

    Args:
        config: the run's configuration.
        prompts: pickled reference to the prompts of data.train_files and of data.val_files.
        workers: the resident actors that plans call.
    """

    def __init__(self, config: Config, prompts: bytes, workers: Workers):
        self.config, self.workers = config, workers
        self.train, self.heldout = ray.get(ray.cloudpickle.loads(prompts))
        self.order = PromptOrder(len(self.train), config.data.train_batch_size, config.run.seed, config.data.shuffle)
        self.reserve = reserve_order(config, len(self.train))
        self.lengths = ResponseLengths()
        self.plans: dict[int, Plan] = {}  # of the present attempt, by iteration
        self.place: PlacementGroup | None = None
        self.controller: ActorHandle | None = None
        self.again: list[int] = []  # prompts that the present attempt starts anew, see carry.py
        self.lock = threading.Lock()
        # A server that Ray has started again knows nothing of earlier attempts: its numbers go on from the clock.
        lost = ray.get_runtime_context().was_current_actor_reconstructed
        self.attempts = Attempts(config.train.ranks, int(time.time()) if lost else 0)

    def iterator(self, iteration: int, attempt: int, rank: int) -> DataIterator | None:
        """The rank's part of an iteration's rows, or None if it has none; the first to ask has the plan made.

        Raises RuntimeError when the attempt is over.
        """
        with self.lock:
            if attempt != self.attempts.number:
                raise RuntimeError(f"attempt {attempt} of the learner is over, {self.attempts.number} is the newest")
            if iteration not in self.plans:
                self.plans[iteration] = self._make(iteration, attempt)
            iterators = self.plans[iteration].iterators
            return iterators[rank] if iterators else None

    def _make(self, iteration: int, attempt: int) -> Plan:
        # Not run/iteration: Ray makes the name part of a log file's path.
        name = f"{self.config.run.name}.{iteration:06d}" + (f".{attempt}" if attempt else "")
        positions = planned(self.config, iteration, self.attempts.first or 0, self.again)
        blocks = iteration_blocks(self.config, iteration, positions, self.order, self.reserve, self.train, self.heldout)
        if not blocks:  # the last iteration, without held-out prompts
            return Plan(name, [])
        if self.workers.reserve:
            ray.get(ray.get_actor(self.workers.reserve).open.remote(name))
        ordered = longest_first(blocks, self.lengths, self.config)
        placed = [block.append_column(PLACE, pa.array([i] * len(block))) for i, block in enumerate(ordered)]
        plan = build_plan(name, placed, self.workers)
        return Plan(name, plan.streaming_split(self.config.train.ranks, equal=False, locality_hints=None))

    def _release(self, iterations: list[int]) -> None:
        dispatcher = ray.get_actor(self.workers.dispatcher)
        for iteration in iterations:
            plan = self.plans.pop(iteration)
            for iterator in plan.iterators[:1]:
                end_execution(iterator._coord_actor)
            dispatcher.forget.remote(plan.name)
            if self.workers.reserve:
                ray.get_actor(self.workers.reserve).forget.remote(plan.name)

    # -- what ranks and the driver tell each other (see Attempts) ------------------------------------------------------

    def begin(self, place: PlacementGroup | None = None, controller: ActorHandle | None = None) -> int:
        """A learner group starts, or starts again: what earlier ones asked for is abandoned. Returns the attempt's
        number. Rank 0 calls it, before anything that may fail.

        Args:
            place: that holds the group's resources.
            controller: Ray Train's actor above the group.
        """
        with self.lock:
            attempt, self.place, self.controller = self.attempts.begin(), place, controller
            if attempt:
                for engine in self.workers.engines:
                    with contextlib.suppress(ray.exceptions.RayActorError):  # its requests are gone with it
                        ray.get(ray.get_actor(engine).abort_all.remote())
            self._release(list(self.plans))
        return attempt

    def group(self) -> tuple[PlacementGroup | None, ActorHandle | None]:
        """What holds the newest learner group, and what is above it (see `begin`)."""
        return self.place, self.controller

    def starts_at(self, attempt: int, iteration: int, again: Sequence[int] = ()) -> None:
        """The attempt has `iteration` trained iterations behind it. All ranks call it before they ask for a plan.

        Args:
            again: positions of prompts that were under way then (see `carry.py`).
        """
        with self.lock:
            if attempt == self.attempts.number:
                self.again = list(again)
        self.attempts.starts_at(attempt, iteration)

    def failed(self, attempt: int, rank: int, error: str) -> None:
        self.attempts.failed(attempt, rank, error)

    def report(self, attempt: int, iteration: int, rank: int, record: Any) -> None:
        """A rank's record of a finished iteration; releases its plan once all ranks have reported, or the one before,
        if it has left prompts to the next."""
        with self.lock:
            self.lengths.add(record["rows"])
        if self.attempts.report(attempt, iteration, rank, record):
            with self.lock:
                leaves = left_by(self.config, iteration + 1, self.attempts.first or 0, self.again) > 0
                self._release([key for key in self.plans if key <= iteration - leaves])

    def told(self, iteration: int, attempt: int, timeout_s: float) -> Told:
        return self.attempts.told(iteration, attempt, timeout_s)

    def pulse(self, attempt: int, rank: int, state: dict[str, Any], heard: str, timeout_s: float) -> str:
        return self.attempts.pulse(attempt, rank, state, heard, timeout_s)

    def pulses(self) -> dict[int, dict[str, Any]]:
        return dict(self.attempts.pulses)

    def give(self, order: str) -> None:
        self.attempts.give(order)


def iteration_size(config: Config, iteration: int, heldout: int) -> int:
    """Samples of an iteration, of all purposes."""
    train = config.data.train_batch_size * config.rollout.n if iteration < config.run.iterations else 0
    return train + heldout * config.eval.n * is_eval(config, iteration, heldout)


def reserve_order(config: Config, prompts: int) -> PromptOrder | None:
    """The order of the prompts in reserve: its own, so that whether they are needed never moves the training order."""
    size = reserve_size(config)
    return PromptOrder(prompts, size, config.run.seed + 1, shuffle=True) if size else None


def iteration_blocks(
    config: Config,
    iteration: int,
    positions: Sequence[int],
    order: PromptOrder,
    reserve: PromptOrder | None,
    train: list[Prompt],
    heldout: list[Prompt],
) -> list[pa.Table]:
    """An iteration's prompts as blocks of PROMPT_COLUMNS rows: groups of rollout.n samples of the prompts at
    `positions` of `order`, those in reserve, then eval.n samples of each held-out prompt where the iteration evaluates.
    Held-out requests come last and fill the tail."""
    blocks: list[pa.Table] = []
    rollout, n_groups = config.rollout, len(positions)
    if iteration < config.run.iterations:
        # What is carried over is a version older when it is trained on.
        min_version = max(0, iteration - config.pipeline.max_staleness + (rollout.carry_over > 0))
        grain = rollout.samples_per_block or rollout.n
        for group_id, position in enumerate(positions):
            prompt = train[order.at(position)]
            group = Group(iteration, group_id, prompt, "train", rollout.n, min_version)
            blocks += group_blocks(group, grain, config.run.seed)
        if reserve:
            indices, _ = reserve.batch_at(iteration * reserve.batch)
            for number, index in enumerate(indices):
                prompt = train[int(index)]
                group = Group(iteration, n_groups + number, prompt, "train", rollout.n, min_version, number)
                blocks += group_blocks(group, grain, config.run.seed)
    if is_eval(config, iteration, len(heldout)):
        for group_id, prompt in enumerate(heldout, start=n_groups + reserve_size(config)):
            group = Group(iteration, group_id, prompt, "heldout", config.eval.n, iteration)
            blocks += group_blocks(group, group.size, config.run.seed)
    return blocks


@dataclass(frozen=True)
class Group:
    """The samples to be made of one prompt, by the names of PROMPT_COLUMNS."""

    iteration: int
    group_id: int
    prompt: Prompt
    purpose: str
    size: int
    min_version: int
    reserve: int = -1


def group_blocks(group: Group, grain: int, seed: int) -> list[pa.Table]:
    """The group's PROMPT_COLUMNS rows, in blocks of `grain` (a divisor of its size)."""
    blocks = []
    for first in range(0, group.size, grain):
        members = range(first, first + grain)
        ids = [f"{group.iteration}/{group.group_id}/{member}" for member in members]
        columns = {
            "sample_id": ids,
            "iteration": [group.iteration] * grain,
            "group_id": [group.group_id] * grain,
            "member": list(members),
            "group_size": [group.size] * grain,
            "purpose": [group.purpose] * grain,
            "reserve": [group.reserve] * grain,
            "prompt_id": [group.prompt.prompt_id] * grain,
            "min_version": [group.min_version] * grain,
            "data_source": [group.prompt.data_source] * grain,
            "prompt": [group.prompt.prompt] * grain,
            "prompt_text": [group.prompt.text] * grain,
            "prompt_ids": [group.prompt.ids] * grain,
            "ground_truth": [group.prompt.ground_truth] * grain,
            "extra_info": [group.prompt.extra_info] * grain,
            "seed": [sample_seed(seed, sample_id) for sample_id in ids],
        }
        block = pa.table({name: pa.array(columns[name], dtype) for name, dtype in PROMPT_COLUMNS.items()})
        if group.prompt.saved and group.purpose == "train":
            saved = [group.prompt.saved[member] for member in members]
            block = block.append_column(SAVED[0], pa.array(saved, SAVED[1]))
        blocks.append(block)
    return blocks


def sample_seed(seed: int, sample_id: str) -> int:
    """A 31-bit sampling seed that follows from the run's seed and the sample's id alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:4], "big") >> 1
