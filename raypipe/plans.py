"""The plan server: makes each iteration's plan once, and hands its split iterators to the learner ranks.

In: prompts, and requests for (iteration, attempt, rank). Out: one iterator per rank. What an iteration contains follows
from its number alone (the prompt order is a function of the seed and a cursor), so a plan can be made again after any
failure and asks for the same prompts. A learner group that restarts asks with a higher attempt: the plans of earlier
attempts are aborted at the engines, so nothing is generated for ranks that are gone. A plan that is over, or abandoned,
is forgotten by the grade dispatcher.
"""

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataIterator

from raypipe.config import Config
from raypipe.pipeline import Workers, build_plan
from raypipe.prompts import Prompt, PromptOrder
from raypipe.rows import PROMPT_COLUMNS


@dataclass
class Plan:
    name: str
    iterators: list[DataIterator]


class PlanServer:
    """A threaded Ray actor; the learner's ranks call `iterator` at the same time.

    Args:
        config: the run's configuration.
        train, heldout: prompts, as read from data.train_files and data.val_files.
        workers: the resident actors that plans call.
    """

    def __init__(self, config: Config, train: list[Prompt], heldout: list[Prompt], workers: Workers):
        self.config, self.train, self.heldout, self.workers = config, train, heldout, workers
        self.order = PromptOrder(len(train), config.data.train_batch_size, config.run.seed, config.data.shuffle)
        self.plans: dict[tuple[int, int], Plan] = {}
        self.attempt = 0
        self.lock = threading.Lock()
        self.reports: dict[int, list[Any]] = {}
        self.reported = threading.Condition()

    def iterator(self, iteration: int, attempt: int, rank: int) -> DataIterator | None:
        """The rank's part of an iteration's rows, or None if it has none; the first to ask has the plan made."""
        with self.lock:
            if attempt > self.attempt:
                self._abandon(attempt)
            key = (iteration, attempt)
            if key not in self.plans:
                self.plans[key] = self._make(iteration, attempt)
            iterators = self.plans[key].iterators
            return iterators[rank] if iterators else None

    def _make(self, iteration: int, attempt: int) -> Plan:
        # Not run/iteration: Ray makes the name part of a log file's path.
        name = f"{self.config.run.name}.{iteration:06d}" + (f".{attempt}" if attempt else "")
        blocks = iteration_blocks(self.config, iteration, self.order, self.train, self.heldout)
        if not blocks:  # the last iteration, without held-out prompts
            return Plan(name, [])
        plan = build_plan(name, blocks, self.workers)
        return Plan(name, plan.streaming_split(self.config.train.ranks, equal=False, locality_hints=None))

    def _abandon(self, attempt: int) -> None:
        for plan in self.plans.values():
            for engine in self.workers.engines:
                ray.get_actor(engine).abort.remote(plan.name)
        self._release(list(self.plans))
        self.attempt = attempt

    def _release(self, keys: list[tuple[int, int]]) -> None:
        dispatcher = ray.get_actor(self.workers.dispatcher)
        for key in keys:
            dispatcher.forget.remote(self.plans.pop(key).name)

    def report(self, iteration: int, rank: int, record: Any) -> None:
        """A rank's record of a finished iteration; releases the iteration's plan once all ranks have reported."""
        with self.reported:
            self.reports.setdefault(iteration, []).append((rank, record))
            complete = len(self.reports[iteration]) == self.config.train.ranks
            self.reported.notify_all()
        if complete:
            with self.lock:
                self._release([key for key in self.plans if key[0] <= iteration])

    def take_reports(self, iteration: int, timeout_s: float) -> list[Any] | None:
        """All ranks' records of an iteration in rank order, or None if they are not there within `timeout_s`."""
        with self.reported:
            if not self.reported.wait_for(
                lambda: len(self.reports.get(iteration, [])) == self.config.train.ranks, timeout_s
            ):
                return None
            return [record for _, record in sorted(self.reports.pop(iteration), key=lambda pair: pair[0])]


def iteration_size(config: Config, iteration: int, heldout: int) -> int:
    """Samples of an iteration, of all purposes."""
    train = config.data.train_batch_size * config.rollout.n if iteration < config.run.iterations else 0
    return train + heldout * is_eval(config, iteration, heldout)


def is_eval(config: Config, iteration: int, heldout: int) -> bool:
    """Whether an iteration's plan also samples the held-out prompts: before the first update, after the last, and
    every `eval.every` in between. Iteration `run.iterations` holds nothing else."""
    every = config.eval.every
    return heldout > 0 and (iteration in (0, config.run.iterations) or (every > 0 and iteration % every == 0))


def iteration_blocks(
    config: Config, iteration: int, order: PromptOrder, train: list[Prompt], heldout: list[Prompt]
) -> list[pa.Table]:
    """An iteration's prompts as blocks of PROMPT_COLUMNS rows: train_batch_size groups of rollout.n samples, then one
    sample of each held-out prompt where the iteration evaluates. Held-out requests come last and fill the tail."""
    blocks: list[pa.Table] = []
    min_version = max(0, iteration - config.pipeline.max_staleness)

    def add(group_id: int, prompt: Prompt, purpose: str, size: int, grain: int) -> None:
        for first in range(0, size, grain):
            members = range(first, first + grain)
            ids = [f"{iteration}/{group_id}/{member}" for member in members]
            columns = {
                "sample_id": ids,
                "iteration": [iteration] * grain,
                "group_id": [group_id] * grain,
                "member": list(members),
                "group_size": [size] * grain,
                "purpose": [purpose] * grain,
                "prompt_id": [prompt.prompt_id] * grain,
                "min_version": [iteration if purpose == "heldout" else min_version] * grain,
                "data_source": [prompt.data_source] * grain,
                "prompt": [prompt.prompt] * grain,
                "prompt_text": [prompt.text] * grain,
                "prompt_ids": [prompt.ids] * grain,
                "ground_truth": [prompt.ground_truth] * grain,
                "extra_info": [prompt.extra_info] * grain,
                "seed": [sample_seed(config.run.seed, sample_id) for sample_id in ids],
            }
            blocks.append(pa.table({name: pa.array(columns[name], dtype) for name, dtype in PROMPT_COLUMNS.items()}))

    if iteration < config.run.iterations:
        indices, _ = order.batch_at(iteration * config.data.train_batch_size)
        grain = config.rollout.samples_per_block or config.rollout.n
        for group_id, index in enumerate(indices):
            add(group_id, train[int(index)], "train", config.rollout.n, grain)
    if is_eval(config, iteration, len(heldout)):
        for group_id, prompt in enumerate(heldout, start=config.data.train_batch_size):
            add(group_id, prompt, "heldout", 1, 1)
    return blocks


def sample_seed(seed: int, sample_id: str) -> int:
    """A 31-bit sampling seed that follows from the run's seed and the sample's id alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:4], "big") >> 1
