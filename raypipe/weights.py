"""The learner's side of a weight update: full parameters out of FSDP shards, into every engine, as one version.

In: the model that each learner rank holds a shard of. Out: engines (or any torch model, `load_bucket`) with the same
parameters. All ranks gather one parameter at a time in lockstep and rank 0 sends it on, so a full copy of the model
never exists on a learner. Two ways to send: `nccl` broadcasts straight into the engines' GPUs; `object_store` packs
parameters into byte buckets, puts each into Ray's object store once, and every engine's node pulls it. Buckets of the
newest version stay there (`WeightStore`), so that an engine that dies can come back with them.

Only tensors' bytes and JSON travel; nothing is unpickled from a model.
"""

import json
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 * 2**20
# Offsets in a bucket are multiples of this, so that a view of any dtype is aligned.
ALIGNMENT = 64


class Bucket(NamedTuple):
    """Tensors of about BUCKET_BYTES together.

    metadata: JSON list of [name, dtype, shape, offset in bytes], e.g. '[["lm_head.weight", "bfloat16", [260, 64], 0]]'.
    data: uint8, 1-D.
    """

    metadata: str
    data: np.ndarray


class Published(NamedTuple):
    """Cost of one weight update: wall seconds until the last engine had it, and bytes sent (once, not per engine)."""

    seconds: float
    bytes: int


def iterate_full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of each parameter in module order; a tied parameter comes once, under its first name.

    LoRA adapters come merged into the weight that they adapt, under the name it had without them. With FSDP2 each step
    gathers one parameter on all ranks, so all ranks must iterate to the end together.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        tensor = full(parameter)
        if name.endswith(".base_layer.weight"):
            layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
            for adapter, scale in layer.scaling.items():
                down, up = full(layer.lora_A[adapter].weight), full(layer.lora_B[adapter].weight)
                tensor = tensor + scale * (up @ down)
        yield name.replace(".base_layer.", "."), tensor


def full(parameter: Tensor) -> Tensor:
    """The whole of a parameter, detached; with FSDP2 a gather, so on all ranks at the same time."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pack(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Casts floating-point tensors to `dtype` and packs all into buckets; a larger tensor gets a bucket of its own."""
    entries: list[list[Any]] = []
    data, end = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in parameters:
        wire = dtype if tensor.is_floating_point() else tensor.dtype
        start = math.ceil(end / ALIGNMENT) * ALIGNMENT
        size = tensor.numel() * wire.itemsize
        if entries and start + size > len(data):
            yield Bucket(json.dumps(entries), data[:end].numpy())
            entries = []
        if not entries:
            data, start = torch.empty(max(bucket_bytes, size), dtype=torch.uint8), 0
        end = start + size
        # One copy does it all: device to host, cast, and the move into place.
        data[start:end].view(wire).view(tensor.shape).copy_(tensor)
        entries.append([name, str(wire).removeprefix("torch."), list(tensor.shape), start])
    if entries:
        yield Bucket(json.dumps(entries), data[:end].numpy())


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a bucket. The tensors are views of `bucket.data`: copy out of them, never write to them."""
    with warnings.catch_warnings():
        # Ray's object store hands out read-only arrays, which torch wraps with a warning.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        data = torch.from_numpy(bucket.data)
    for name, dtype_name, shape, start in json.loads(bucket.metadata):
        dtype = getattr(torch, dtype_name)
        yield name, data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@torch.no_grad()
def load_bucket(model: nn.Module, bucket: Bucket) -> None:
    """Copies a bucket into a model's parameters of the same names, with a cast to their dtype and device.

    Raises ValueError for a name or shape that the model does not have.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in unpack(bucket):
        if name not in parameters:
            raise ValueError(f"the weight update holds {name}, which {type(model).__name__} does not have")
        if parameters[name].shape != tensor.shape:
            raise ValueError(
                f"the weight update holds {name} with shape {list(tensor.shape)}, but {type(model).__name__} "
                f"has it with {list(parameters[name].shape)}"
            )
        parameters[name].copy_(tensor)


class Engines:
    """The engines of a run, called together; an error names the engine it came from.

    Args:
        handles: actors from `start_engines`.

    Attributes:
        ready: what each engine said of itself, in the order of `handles`.
        lost: names of engines that died during this update; Ray starts them again.
    """

    def __init__(self, handles: list[ActorHandle]):
        self.handles = handles
        try:
            self.ready: list[dict[str, Any]] = ray.get([handle.ready.remote() for handle in handles])
        except RayActorError as error:
            raise RuntimeError(f"an engine is dead and cannot come back: {error}") from error
        self.lost: set[str] = set()

    @property
    def weight_transfer(self) -> str:
        return self.ready[0]["weight_transfer"]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.ready[0]["dtype"])

    @property
    def store(self) -> ActorHandle:
        return ray.get_actor(self.ready[0]["weight_store"])

    def start(self, method: str, *args: Any) -> dict[str, ray.ObjectRef]:
        """Calls `method` on every engine that is not lost; the references by engine name."""
        return {
            ready["name"]: getattr(handle, method).remote(*args)
            for handle, ready in zip(self.handles, self.ready, strict=True)
            if ready["name"] not in self.lost
        }

    def finish(self, calls: dict[str, ray.ObjectRef]) -> None:
        for name, call in calls.items():
            try:
                ray.get(call)
            except RayActorError:
                self.lost.add(name)
            except RayTaskError as error:
                raise RuntimeError(f"{name}: {error.cause}") from error

    def call(self, method: str, *args: Any) -> None:
        self.finish(self.start(method, *args))

    def restore_lost(self, version: int) -> None:
        """Waits until the engines that died in this update run again and have it from the store."""
        for handle, ready in zip(self.handles, self.ready, strict=True):
            if ready["name"] in self.lost:
                try:
                    ray.get(handle.restore.remote(version))
                except (RayActorError, RayTaskError) as error:
                    raise RuntimeError(f"{ready['name']} died and could not come back: {error}") from error


def send_buckets(
    parameters: Iterator[tuple[str, Tensor]], version: int, engines: Engines, in_flight: bool, bucket_bytes: int
) -> int:
    """Sends through Ray's object store; returns bytes. Engines load one bucket while the next one is gathered."""
    ray.get(engines.store.clear.remote())
    engines.call("start_update", in_flight)
    buckets, sent = [], 0
    loading: dict[str, ray.ObjectRef] = {}
    for bucket in pack(parameters, engines.dtype, bucket_bytes):
        buckets.append(ray.put(bucket))
        sent += bucket.data.nbytes
        engines.finish(loading)
        loading = engines.start("update_bucket", buckets[-1])
    engines.finish(loading)
    # Before the engines switch, so that one that dies from here on starts again with this version.
    ray.get(engines.store.set.remote(version, buckets))
    engines.call("finish_update", version)
    engines.restore_lost(version)
    return sent


class WeightPublisher:
    """One per learner rank: `publish` on all ranks together brings a version of the weights to all engines.

    Args:
        bucket_bytes: size of what travels at a time through the object store.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._nccl: Any = None  # raypipe.engines.nccl.NCCLSender

    def publish(
        self, model: nn.Module, version: int, engine_handles: list[ActorHandle], in_flight: bool = False
    ) -> Published:
        """Returns when every engine runs `version`; the same result on all ranks.

        Args:
            model: the policy as a Hugging Face causal LM, plain or sharded with FSDP2.
            version: the number that requests ask for at the gate and that tokens are marked with.
            engine_handles: actors from `start_engines`.
            in_flight: True freezes running requests and goes on with the new weights; False lets them finish first.

        Raises RuntimeError, on all ranks, that names the engine that failed.
        """
        begin = time.perf_counter()
        parameters = iterate_full_parameters(model)
        sent, failure = 0, None
        if rank() == 0:
            try:
                sent = self._send(model, parameters, version, Engines(engine_handles), in_flight)
            except Exception as error:
                failure = error
        for _ in parameters:
            pass  # The other ranks' part of the gathers; on rank 0 what a failed send left over.
        outcome = [(sent, str(failure) if failure else "")]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, src=0)
        sent, message = outcome[0]
        if message:
            raise RuntimeError(f"weight update {version} failed: {message}") from failure
        return Published(time.perf_counter() - begin, sent)

    def _send(
        self, model: nn.Module, parameters: Iterator[tuple[str, Tensor]], version: int, engines: Engines,
        in_flight: bool,
    ) -> int:  # fmt: skip
        if engines.weight_transfer == "object_store":
            return send_buckets(parameters, version, engines, in_flight, self.bucket_bytes)
        from raypipe.engines.nccl import NCCLSender  # imports vLLM

        if self._nccl is None or self._nccl.group != NCCLSender.group_of(engines):
            self._nccl = NCCLSender(model, engines)
        sender, self._nccl = self._nccl, None  # a sender whose send fails is not used again
        sent = sender.send(model, parameters, version, engines, in_flight)
        self._nccl = sender
        return sent


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
