"""A resident vLLM engine: one Ray actor that answers requests for single samples and takes new weights.

In: requests (prompt ids, sampling settings, lowest weight version they may use). Out: GENERATE_COLUMNS of `rows.py`.
The actor outlives every plan. It holds the gate, so that a request of the next iteration can already wait here while
the weights it needs are still being trained, and it answers a repeated request once: the stage that asks may die and
ask again.

vLLM's scheduler and model run in a child process (EngineCore). When that dies the actor ends with it, and Ray starts
both again, with the newest weights from the `WeightStore`.

Whoever looks an engine up by its name has this module imported by Ray, each plan's Generate stage too. So torch and
vLLM are imported by the actor alone: two seconds less in the start of every plan.
"""

import asyncio
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.actor import ActorHandle

from raypipe.config import Config, engine_count
from raypipe.engines.gate import Gate
from raypipe.engines.weight_store import ensure_version, load_newest, start_store
from raypipe.live import Live, engine_metrics
from raypipe.placement import for_ray
from raypipe.rows import TOO_LONG
from raypipe.watchdog import ANSWER_S, oldest, stacks

if TYPE_CHECKING:
    from raypipe.weights import Bucket

# Calls that may wait in one actor, gated requests included. Past any plan, so that a weight update never queues behind
# the very requests that wait for it.
MAX_CONCURRENCY = 100_000
# Aborted plans that are remembered, so that their late requests are refused.
ABORTED_PLANS = 64


def start_engines(config: Config, run_name: str) -> list[ActorHandle]:
    """Starts `engine.count` engines named `{run_name}/engine-{i}`; `ready()` of each answers once it is up."""
    from raypipe.colocate import place_engine
    from raypipe.engines.vllm_config import weight_transfer

    engine, gpus = config.engine, bool(ray.cluster_resources().get("GPU"))
    store = f"{run_name}/weights" if weight_transfer(config, gpus) == "object_store" else ""
    if store:
        start_store(store)
    num_gpus = engine.num_gpus if engine.num_gpus >= 0 else engine.tensor_parallel_size * gpus
    actor: Any = ray.remote(VLLMEngine)
    started = []
    for i in range(engine_count(config)):
        shared = config.pipeline.colocate and gpus
        anywhere = {"num_gpus": num_gpus, "label_selector": for_ray(engine.node_labels)}
        place, gpu_ids = place_engine(config) if shared else (anywhere, [])
        options = actor.options(
            name=f"{run_name}/engine-{i}",
            num_cpus=engine.num_cpus,
            max_concurrency=MAX_CONCURRENCY,
            # Over NCCL no copy of the weights is kept to come back with: the run fails, and resumes from a checkpoint.
            max_restarts=-1 if store else 0,
            **place,
        )
        started.append(options.remote(f"engine-{i}", config, store, gpu_ids))
    return started


class VLLMEngine:
    """Args:
    name: as in the rows, e.g. "engine-0".
    config: the run's; of it model, engine, rollout and the length limits.
    store: name of the `WeightStore` actor; empty with NCCL.
    gpus: ids of the GPUs that it runs on, where Ray does not show it all of them; empty: those that Ray shows.
    """

    def __init__(self, name: str, config: Config, store: str, gpus: Sequence[str] = ()):
        from raypipe.engines.vllm_config import engine_args, set_environment

        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        set_environment(config)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.name, self.config, self.store, self.gpus = name, config, store, list(gpus)
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(config, bool(store))))
        self.closed = False
        threading.Thread(target=self._exit_with_core, name="exit-with-core", daemon=True).start()
        self.gate = Gate(None)  # _start opens it
        self.starting: asyncio.Task[None] | None = None
        self.updating = self.paused = self.broken = self.asleep = False
        self.update_since = 0.0
        self.update_seconds: float | None = None
        self.tasks: dict[tuple[str, str], asyncio.Task[dict[str, Any]]] = {}
        # Results whose receiver may have died before it had them: as many as can run at once, twice over.
        self.recent: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self.aborted: deque[str] = deque(maxlen=ABORTED_PLANS)
        self.since: dict[str, float] = {}  # samples that run, and since when
        self.running = self.generated_tokens = 0
        self.busy_seconds = self.busy_since = 0.0

    # -- requests ------------------------------------------------------------------------------------------------------

    @ray.method(max_task_retries=-1)
    async def ready(self) -> dict[str, Any]:
        """What the learner and the driver need to know of this engine."""
        await self._started()
        model = self.llm.model_config
        return {
            "name": self.name,
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "gpus": self.gpus,
            "device": self.llm.vllm_config.device_config.device_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "version": self.gate.version,
            "tensor_parallel_size": self.config.engine.tensor_parallel_size,
            "weight_transfer": "object_store" if self.store else "nccl",
            "weight_store": self.store,
        }

    @ray.method(max_task_retries=-1)
    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """One sample for one request, once the weights are as new as it asks for.

        A request that is repeated (same plan and sample_id) joins the first one while that waits or runs, and gets the
        same answer for a while after. Never raises for what a request holds: what vLLM refuses, and what is aborted,
        comes back with finish_reason "failed" and the reason in generate_error.

        Args:
            request: sample_id, plan, prompt_ids, min_version, seed, temperature, top_p, max_tokens, stop.

        Returns: GENERATE_COLUMNS of `rows.py`.
        """
        await self._started()
        key = (request["plan"], request["sample_id"])
        if key in self.recent:
            return self.recent[key]
        if key not in self.tasks:
            self.tasks[key] = asyncio.create_task(self._generate(request))
            self.tasks[key].add_done_callback(lambda _: self.tasks.pop(key))
        # Shielded: a caller that goes away does not end the sample for another one that joined, or asks again.
        return await asyncio.shield(self.tasks[key])

    async def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.time()
        try:
            if request["plan"] in self.aborted:
                raise asyncio.CancelledError
            await self.gate.wait(request["min_version"], request.get("place", 0))
            start = time.time()
            self.since[request["sample_id"]] = start
            with self._busy():
                async with asyncio.timeout(self.config.watchdog.sample_s):
                    response = await self._sample(request)
        except asyncio.CancelledError:
            response = failed(f"aborted with plan {request['plan']}")
        except TimeoutError:
            response = failed(f"{TOO_LONG}: over watchdog.sample_s={self.config.watchdog.sample_s:g} in {self.name}")
            self._log(f"sample {request['sample_id']} of plan {request['plan']}: {response['generate_error']}")
        except Exception as error:
            self._exit_if_dead()
            response = failed(f"{type(error).__name__}: {error}")
        finally:
            self.since.pop(request["sample_id"], None)
        row = response | {"engine": self.name, "generate_start": start, "generate_end": time.time()}
        if not row["generate_error"]:
            self.recent[request["plan"], request["sample_id"]] = row
            while len(self.recent) > 2 * self.config.engine.max_num_seqs:
                self.recent.popitem(last=False)
        return row

    async def _sample(self, request: dict[str, Any]) -> dict[str, Any]:
        from vllm.inputs.engine import tokens_input
        from vllm.logprobs import FlatLogprobs

        from raypipe.engines.vllm_config import sampling_params

        sampling = sampling_params(request, self.config.rollout)
        prompt = tokens_input([int(token) for token in request["prompt_ids"]])
        async for result in self.llm.generate(prompt, sampling, f"{request['plan']}/{request['sample_id']}"):
            output = result.outputs[0]
        ids = list(output.token_ids)
        self.generated_tokens += len(ids)
        versions = [int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)]
        assert isinstance(output.logprobs, FlatLogprobs)
        logprobs = output.logprobs.logprobs
        assert output.finish_reason in ("stop", "length") and len(ids) == len(versions) == len(logprobs), output
        return {
            "response_text": output.text or self.llm.get_tokenizer().decode(ids, skip_special_tokens=True),
            "response_ids": ids,
            "engine_logprobs": logprobs,
            "weight_versions": versions,
            "finish_reason": output.finish_reason,
            "generate_error": "",
        }

    @ray.method(max_task_retries=-1)
    async def abort(self, plan: str, samples: Sequence[str] | None = None) -> int:
        """Ends requests of `plan`, at the gate or running; returns how many. Those of `samples` (their ids), or without
        it all of them, and then those still to come are refused."""
        if samples is None:
            return self._abort({plan})
        wanted = set(samples)
        return self._cancel([task for (of, id), task in self.tasks.items() if of == plan and id in wanted])

    @ray.method(max_task_retries=-1)
    async def abort_all(self) -> int:
        """Ends all requests there are, and refuses later ones of their plans; returns how many."""
        return self._abort({plan for plan, _ in self.tasks})

    def _abort(self, plans: set[str]) -> int:
        self.aborted += [plan for plan in plans if plan not in self.aborted]
        return self._cancel([task for (plan, _), task in self.tasks.items() if plan in plans])

    def _cancel(self, tasks: list[asyncio.Task[dict[str, Any]]]) -> int:
        for task in tasks:
            task.cancel()
        return len(tasks)

    @ray.method(max_task_retries=-1)
    async def stats(self) -> dict[str, Any]:
        """Counters since the engine started: busy_seconds is time in which at least one request ran; update_seconds is
        that of the last weight update."""
        return self._stats()

    def _stats(self) -> dict[str, Any]:
        busy = self.busy_seconds + (time.monotonic() - self.busy_since if self.running else 0.0)
        return {
            "in_flight": self.running,
            "waiting": self.gate.waiting,
            "version": self.gate.version,
            "generated_tokens": self.generated_tokens,
            "busy_seconds": busy,
            "update_seconds": self.update_seconds,
        }

    @ray.method(max_task_retries=-1)
    async def doing(self) -> list[str]:
        """What a stalled run shows of this engine."""
        state = f"weights {self.gate.version}, {self.running} samples run, {self.gate.waiting} wait at the gate"
        try:
            async with asyncio.timeout(ANSWER_S / 2):
                await self.llm.is_sleeping()  # a question to the EngineCore
        except TimeoutError:
            reason = "vLLM's EngineCore does not answer"
            state += f"; {reason}, the engine is started again"
            asyncio.get_running_loop().call_later(1.0, self._exit, reason)
        return [state, *oldest(self.since), *stacks()]

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self.running:
            self.busy_since = time.monotonic()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.busy_seconds += time.monotonic() - self.busy_since

    # -- weights -------------------------------------------------------------------------------------------------------

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the learner's NCCL group (vLLM's NCCLWeightTransferInitInfo as a dict)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.shutdown_weight_transfer_engine()  # the group of a learner that is gone
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def sleep(self) -> None:
        """Frees weights and cache for others on its GPUs, until the next update; requests wait at the gate."""
        self.gate.close()
        if not self.asleep:
            self.asleep = True
            with self._broken_on_error():
                await self.llm.sleep(self.config.engine.sleep_level, mode="wait")

    async def start_update(self, in_flight: bool = False) -> None:
        """Closes the gate and brings the engine to rest: running requests are frozen (in_flight) or finish first. One
        that sleeps gets room for its weights, not yet for its cache."""
        if self.broken:
            self._exit("new weights while those of a failed update are half loaded")
        self.gate.close()
        self.update_since = time.monotonic()
        if self.asleep:
            with self._broken_on_error():
                await self.llm.wake_up(["weights"])
        if self.updating:  # by a learner that is gone
            await self.llm.finish_weight_update()
        if self.running and not self.paused:  # frozen by a learner that is gone, they stay so
            self.paused = True
            await self.llm.pause_generation(mode="keep" if in_flight else "wait")
        await self.llm.start_weight_update()
        self.updating = True

    async def update(self, update_info: dict[str, Any]) -> None:
        """One part of the new weights, in the form of the weight-transfer backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._broken_on_error():
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def update_bucket(self, bucket: "Bucket") -> None:
        """One bucket of the new weights, handed to the EngineCore through an anonymous memory file.

        Unlike a file in /dev/shm it has no name to guess, is gone with its last user, and is not limited by the size
        of that mount (64 MiB by default in containers).
        """
        memory = os.memfd_create("raypipe-weights")
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(bucket.data.data)
            await self.update({"path": f"/proc/{os.getpid()}/fd/{memory}", "metadata": bucket.metadata})
        finally:
            os.close(memory)

    async def finish_update(self, version: int) -> None:
        """Switches to the new weights and lets the requests pass that `version` satisfies."""
        with self._broken_on_error():
            await self.llm.finish_weight_update(str(version))
        self.updating = False
        if self.asleep:
            with self._broken_on_error():
                await self.llm.wake_up(["kv_cache"])
            self.asleep = False  # and the prefix cache is empty
        elif not self.paused and not await self.llm.reset_prefix_cache():  # a pause has already dropped it
            raise RuntimeError("the prefix cache of the old weights could not be dropped")
        self.recent.clear()
        if self.paused:
            await self.llm.resume_generation()
            self.paused = False
        self.gate.open(version)
        self.update_seconds = time.monotonic() - self.update_since

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        """Layers that vLLM has half loaded cannot be taken back: the engine starts again, once the caller knows why."""
        try:
            yield
        except Exception:
            self.broken = True
            asyncio.get_running_loop().call_later(1.0, self._exit, "a weight update failed")
            raise

    @ray.method(max_task_retries=-1)
    async def restore(self, version: int) -> None:
        """After a death during the update to `version`: loads it from the store unless the restart already did."""
        await self._started()
        await ensure_version(version, self.gate, self._load_newest)

    async def _load_newest(self) -> None:
        if not await load_newest(self.store, self):  # nothing published yet: the weights on disk are the newest
            await self.llm.update_weight_version("0")
            self.gate.open(0)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def _started(self) -> None:
        """The part of the start that needs the event loop; the first call does it, others wait for it."""
        if self.starting is None:
            self.starting = asyncio.create_task(self._start())
        if not self.starting.done():
            await asyncio.shield(self.starting)

    async def _start(self) -> None:
        self.reporting = asyncio.create_task(Live().report(self._stats, engine_metrics))
        try:
            await self._load_newest()
        except Exception as error:
            # Gone with the learner that owned them, say. The gate stays closed until the next learner's first update.
            self._log(f"the newest weights could not be loaded, waiting for an update: {error}")

    async def close(self) -> None:
        """Ends vLLM's processes; the actor answers no further request."""
        self.closed = True
        if self.starting:
            self.reporting.cancel()
        for task in list(self.tasks.values()):
            task.cancel()
        self.llm.shutdown(timeout=10)

    def _exit_with_core(self) -> None:
        while not self.closed:
            self._exit_if_dead()
            time.sleep(0.2)

    def _exit_if_dead(self) -> None:
        if self.llm.errored and not self.closed:
            self._exit("vLLM's EngineCore died")

    def _exit(self, reason: str) -> NoReturn:
        self._log(f"{reason}; ending the engine, so that Ray starts it again")
        os._exit(1)

    def _log(self, message: str) -> None:
        print(f"{self.name}: {message}", file=sys.stderr, flush=True)


def failed(error: str) -> dict[str, Any]:
    """The part of GENERATE_COLUMNS that says a sample could not be made, and why."""
    return {
        "response_text": "",
        "response_ids": [],
        "engine_logprobs": [],
        "weight_versions": [],
        "finish_reason": "failed",
        "generate_error": error[:2000],
    }
