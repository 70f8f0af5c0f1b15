"""Scorers: resident Ray actors that run one model over finished samples, the reference, the policy or the critic.

In: single samples (prompt and response ids, the lowest weight version they may be scored with). Out: one float a
response token: log-probs, or values. Samples batch naturally: a scorer that becomes free takes what is queued, up to
its token budget, at once. Weights come as they come to engines, through the object store, behind the same gate; the
reference keeps those of model.path.

Whoever looks a scorer up by its name has this module imported by Ray, each plan's Score stage too. So torch and the
model (scoring.py) are imported by the actor alone: three seconds less in the start of every plan.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from raypipe.config import Config, scorer_roles
from raypipe.engines.gate import Gate
from raypipe.engines.weight_store import ensure_version, load_newest, start_store
from raypipe.placement import for_ray
from raypipe.rows import TOO_LONG
from raypipe.watchdog import stacks

if TYPE_CHECKING:
    from raypipe.weights import Bucket

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
                max_restarts=-1,
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
        from raypipe.scoring import ScoringModel

        self.model = ScoringModel(role, config)
        self.gate = Gate(None)
        self.starting: asyncio.Task[None] | None = None
        self.queue: deque[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = deque()
        self.working: asyncio.Task[None] | None = None
        self.weights = asyncio.Lock()  # held while a forward pass reads them, and through an update
        self.updating = False
        self.since = 0.0  # start of the forward pass that runs
        self.scored = 0

    @ray.method(max_task_retries=-1)
    async def ready(self) -> dict[str, Any]:
        """What the learner needs to know to send weights (see `weights.Engines`)."""
        await self._started()
        return {
            "name": self.name,
            "pid": os.getpid(),
            "device": self.model.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
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
        try:
            async with asyncio.timeout(self.config.watchdog.sample_s):
                return await result
        except TimeoutError:
            limit_s = self.config.watchdog.sample_s
            raise TimeoutError(f"{TOO_LONG}: over watchdog.sample_s={limit_s:g} in {self.name}") from None

    async def _work(self) -> None:
        while self.queue:
            async with self.weights:
                taken = self._take()
                start = self.since = time.time()
                try:
                    values = await asyncio.to_thread(self.model.forward, [sample for sample, _ in taken])
                except Exception as error:
                    for _, result in taken:
                        if not result.done():
                            result.set_exception(error)
                    continue
                finally:
                    self.since = 0.0
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
            sample, result = self.queue[0]
            if result.done():  # whoever asked has given up
                self.queue.popleft()
                continue
            tokens += len(sample["prompt_ids"]) + len(sample["response_ids"])
            if taken and tokens > self.config.scorer.micro_batch_tokens:
                break
            taken.append(self.queue.popleft())
        return taken

    # -- weights, called as engines are (weights.Engines) --------------------------------------------------------------

    async def start_update(self, in_flight: bool = False) -> None:
        """Closes the gate and waits for the forward pass that runs; samples behind it are scored with new weights."""
        self.gate.close()
        if not self.updating:  # else by a learner that is gone
            await self.weights.acquire()
            self.updating = True

    async def update_bucket(self, bucket: "Bucket") -> None:
        await asyncio.to_thread(self.model.load, bucket)

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
            self.starting = asyncio.create_task(self._start())
        await asyncio.shield(self.starting)

    async def _start(self) -> None:
        try:
            await self._load_newest()
        except Exception as error:
            # Gone with the learner that owned them, say. The gate stays closed until the next learner's first update.
            print(f"{self.name}: no newest weights, waiting for an update: {error}", file=sys.stderr)

    async def _load_newest(self) -> None:
        if not await load_newest(self.store, self):  # nothing published yet: the weights on disk are the newest
            self.gate.open(0)

    @ray.method(max_task_retries=-1)
    async def doing(self) -> list[str]:
        """What a stalled run shows of this scorer."""
        work = f", a forward pass since {time.time() - self.since:.0f} s" if self.since else ""
        state = f"weights {self.gate.version}, {len(self.queue)} samples wait, {self.gate.waiting} at the gate{work}"
        return [state, *stacks()]

    @ray.method(max_task_retries=-1)
    async def stats(self) -> dict[str, Any]:
        return {"queued": len(self.queue), "scored": self.scored, "version": self.gate.version}

    async def close(self) -> None:
        """Ends what is in work; the actor answers no further request."""
        if self.working:
            self.working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.working
