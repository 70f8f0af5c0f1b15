"""Scorers: resident Ray actors that run one model over finished samples, the reference, the policy or the critic.

In: single samples (prompt and response ids, the lowest weight version they may be scored with). Out: one float a
response token: log-probs, or values. Samples batch naturally: a scorer that becomes free takes what is queued, up to
its token budget, at once. Weights come as they come to engines, through the object store, behind the same gate; the
reference keeps those of model.path.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import deque
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from raypipe.batching import lay_out, micro_batches
from raypipe.config import Config, scorer_roles
from raypipe.engines.gate import Gate
from raypipe.engines.weight_store import ensure_version, load_newest, start_store
from raypipe.modeling import compute_dtype, load_critic, load_policy, row_tokens
from raypipe.placement import for_ray
from raypipe.weights import Bucket, load_bucket

# A scorer may die this often in a run before the run fails.
MAX_RESTARTS = 5
# Calls that may wait in one actor, past any plan.
MAX_CONCURRENCY = 100_000


def scorer_names(config: Config) -> dict[str, list[str]]:
    """Names of the scorers of each role; empty if the algorithm needs none."""
    return {
        role: [f"{config.run.name}/scorer-{role}-{i}" for i in range(config.scorer.count)]
        for role in scorer_roles(config)
    }


def start_scorers(config: Config, num_gpus: float) -> dict[str, list[ActorHandle]]:
    """Starts `scorer.count` scorers of each role; `ready()` of each answers once it is up."""
    started: dict[str, list[ActorHandle]] = {}
    actor: Any = ray.remote(Scorer)
    for role, names in scorer_names(config).items():
        store = f"{config.run.name}/weights-{role}" if role != "ref_logprobs" else ""
        if store:
            start_store(store)
        started[role] = [
            actor.options(
                name=name, num_cpus=config.scorer.num_cpus, num_gpus=num_gpus,
                label_selector=for_ray(config.scorer.node_labels), max_concurrency=MAX_CONCURRENCY,
                max_restarts=MAX_RESTARTS,
            ).remote(role, name.rpartition("/")[2], config, store)
            for name in names
        ]  # fmt: skip
    return started


class Scorer:
    """Args:
    role: ref_logprobs | old_logprobs | values.
    name: as in the rows, e.g. "scorer-values-0".
    config: the run's.
    store: name of the `WeightStore` that it comes back with after a death; empty for the reference.
    """

    def __init__(self, role: str, name: str, config: Config, store: str):
        self.name, self.config, self.store = name, config, store
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, int(config.scorer.num_cpus)))
        model = dataclasses.replace(config.model, lora_rank=0, activation_checkpointing=False)
        self.is_critic = role == "values"
        module: Any = load_critic(config.critic.path or model.path, model) if self.is_critic else load_policy(model)
        self.dtype = compute_dtype(model.dtype, self.device)
        self.module = module.to(self.device, self.dtype).eval().requires_grad_(False)
        budget = config.scorer.micro_batch_tokens
        self.row_tokens = row_tokens(self.module, model.attention, self.device, budget)
        self.gate = Gate(None)
        self.starting: asyncio.Task[None] | None = None
        self.queue: deque[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = deque()
        self.working: asyncio.Task[None] | None = None
        self.weights = asyncio.Lock()  # held while a forward pass reads them, and through an update
        self.updating = False
        self.scored = 0

    @ray.method(max_task_retries=-1)
    async def ready(self) -> dict[str, Any]:
        """What the learner needs to know to send weights (see `weights.Engines`)."""
        await self._started()
        return {
            "name": self.name,
            "pid": os.getpid(),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "version": self.gate.version,
            "weight_transfer": "object_store",
            "weight_store": self.store,
        }

    @ray.method(max_task_retries=-1)
    async def score(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Scores one sample, once the weights are as new as it asks for.

        Args:
            sample: prompt_ids, response_ids (at least one each), min_version.

        Returns: values (one float a response token), and scorer, start and end (of the forward pass, in seconds since
        the epoch).
        """
        await self._started()
        await self.gate.wait(sample["min_version"] if self.store else 0)
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.queue.append((sample, result))
        if self.working is None or self.working.done():
            self.working = asyncio.create_task(self._work())
        return await result

    async def _work(self) -> None:
        while self.queue:
            async with self.weights:
                taken = self._take()
                start = time.time()
                try:
                    values = await asyncio.to_thread(self._forward, [sample for sample, _ in taken])
                except Exception as error:
                    for _, result in taken:
                        if not result.done():
                            result.set_exception(error)
                    continue
            end = time.time()
            self.scored += len(taken)
            for (_, result), found in zip(taken, values, strict=True):
                if not result.done():
                    result.set_result({"values": found, "scorer": self.name, "start": start, "end": end})

    def _take(self) -> list[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]]:
        """What is queued, first come first served, up to the token budget."""
        taken: list[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = []
        tokens = 0
        while self.queue:
            sample = self.queue[0][0]
            tokens += len(sample["prompt_ids"]) + len(sample["response_ids"])
            if taken and tokens > self.config.scorer.micro_batch_tokens:
                break
            taken.append(self.queue.popleft())
        return taken

    @torch.no_grad()
    def _forward(self, samples: list[dict[str, Any]]) -> list[list[float]]:
        lengths = [len(sample["prompt_ids"]) + len(sample["response_ids"]) for sample in samples]
        found: list[list[float]] = [[] for _ in samples]
        for rows in micro_batches(lengths, self.config.scorer.micro_batch_tokens, self.row_tokens):
            pairs = [[(samples[i]["prompt_ids"], samples[i]["response_ids"]) for i in row] for row in rows]
            indices = [i for row in rows for i in row]
            batch = lay_out(pairs, self.device)
            if self.is_critic:
                values_N = self.module(batch)
            else:
                values_N, _ = self.module(batch, self.config.rollout.temperature)
            parts = values_N.cpu().split([len(samples[i]["response_ids"]) for i in indices])
            for i, values in zip(indices, parts, strict=True):
                found[i] = values.tolist()
        return found

    # -- weights, called as engines are (weights.Engines) --------------------------------------------------------------

    async def start_update(self, in_flight: bool = False) -> None:
        """Closes the gate and waits for the forward pass that runs; samples behind it are scored with new weights."""
        self.gate.close()
        if not self.updating:  # else by a learner that is gone
            await self.weights.acquire()
            self.updating = True

    async def update_bucket(self, bucket: Bucket) -> None:
        await asyncio.to_thread(load_bucket, self.module.model, bucket)

    async def finish_update(self, version: int) -> None:
        self.updating = False
        self.weights.release()
        self.gate.open(version)

    @ray.method(max_task_retries=-1)
    async def restore(self, version: int) -> None:
        """After a death during the update to `version`: loads it from the store unless the restart already did."""
        await self._started()
        await ensure_version(version, self.gate, self._load_newest)

    async def _started(self) -> None:
        if self.starting is None:
            self.starting = asyncio.create_task(self._load_newest())
        await asyncio.shield(self.starting)

    async def _load_newest(self) -> None:
        if not await load_newest(self.store, self):  # nothing published yet: the weights on disk are the newest
            self.gate.open(0)

    @ray.method(max_task_retries=-1)
    async def stats(self) -> dict[str, Any]:
        return {"queued": len(self.queue), "scored": self.scored, "version": self.gate.version}

    async def close(self) -> None:
        """Ends what is in work; the actor answers no further request."""
        if self.working:
            self.working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.working
