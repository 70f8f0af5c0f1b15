"""Weights from learner rank 0 into the engines' GPUs by NCCL broadcast, through vLLM's own trainer-side sender.

In: the learner's parameters as they are gathered. Out: the same parameters, cast, in every worker of every engine. One
NCCL group holds rank 0 of the learner and all workers of all engines; vLLM packs parameters into large buffers and
overlaps gather and broadcast. raypipe adds what a run of several engines needs: each engine's place in the group, the
cast to the engines' dtype, and the gate.

Only learner rank 0 builds a sender; the other ranks take part in the gathers alone.
"""

import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import ray
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from raypipe.weights import Engines

# Two such buffers live on the learner's GPU and on each engine's, next to the largest tensor.
BUFFER_BYTES = 256 * 2**20


class CastParameters(WeightSource):
    """The parameters of one update, floating-point ones cast to `dtype`; set `parameters` before each update."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.parameters: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and global shapes in the order of iteration; reads no shard, so no other rank takes part."""
        return [
            ParamMeta(name, self.dtype if parameter.is_floating_point() else parameter.dtype, tuple(parameter.shape))
            for name, parameter in self.model.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.parameters:
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class GatedClient:
    """vLLM's four calls of a weight update, made to every engine of the run (the protocol VLLMWeightSyncClient)."""

    def __init__(self, engines: Engines):
        self.engines, self.version, self.in_flight = engines, 0, False
        # Frees rank 0 from a broadcast that a failed engine will never join; set once the group exists.
        self.abort_broadcast: Callable[[], None] = lambda: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """All engines at once, since each blocks until the whole group is there; ranks are contiguous per engine."""
        offset, calls = init_info["rank_offset"], dict[str, ray.ObjectRef]()
        for handle, ready in zip(self.engines.handles, self.engines.ready, strict=True):
            calls[ready["name"]] = handle.init_weight_transfer.remote(init_info | {"rank_offset": offset})
            offset += ready["tensor_parallel_size"]
        self._finish(calls)

    def start_weight_update(self) -> None:
        self._finish(self.engines.start("start_update", self.in_flight))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        try:
            self._finish(self.engines.start("update", update_info))
        except BaseException:
            self.abort_broadcast()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._finish(self.engines.start("finish_update", self.version))

    def _finish(self, calls: dict[str, ray.ObjectRef]) -> None:
        self.engines.finish(calls)
        if self.engines.lost:
            raise RuntimeError(
                f"{', '.join(sorted(self.engines.lost))} died; over NCCL an engine cannot come back, "
                "start the run again with run.resume=auto"
            )


class NCCLSender:
    """Rank 0's end of the NCCL group. Made anew when the engines change; `group_of` tells when."""

    def __init__(self, model: nn.Module, engines: Engines):
        self.group = self.group_of(engines)
        self.source = CastParameters(model, engines.dtype)
        self.client = GatedClient(engines)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self.trainer = cast(NCCLTrainerWeightTransferEngine, WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=ray.util.get_node_ip_address(),
                master_port=port,
                world_size=1 + sum(ready["tensor_parallel_size"] for ready in engines.ready),
                packed_buffer_size_bytes=BUFFER_BYTES,
                rank=0,
            ),
            client=self.client,
            source=self.source,
        ))  # fmt: skip
        assert self.trainer.model_update_group is not None
        self.client.abort_broadcast = self.trainer.model_update_group.destroy

    @staticmethod
    def group_of(engines: Engines) -> list[tuple[str, int]]:
        """Identity of the engines' processes."""
        return [(ready["node"], ready["pid"]) for ready in engines.ready]

    def send(
        self, model: nn.Module, parameters: Iterator[tuple[str, Tensor]], version: int, engines: Engines,
        in_flight: bool,
    ) -> int:  # fmt: skip
        """Returns bytes sent, counted once."""
        self.source.model, self.source.parameters = model, parameters
        self.client.engines, self.client.version, self.client.in_flight = engines, version, in_flight
        self.trainer.send_weights()
        return sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self.source.metadata())

    def close(self) -> None:
        self.trainer.shutdown()
