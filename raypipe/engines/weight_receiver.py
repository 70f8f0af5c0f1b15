"""The engine's side of a weight update through shared memory; lives in vLLM's worker process.

In: for each bucket the path of an anonymous memory file that the engine actor filled, and the bucket's metadata. Out:
the model's parameters replaced. vLLM imports this module because `Worker` is its `worker_extension_cls`; the import
registers the receiver as weight-transfer backend `object_store` next to vLLM's own (nccl, ipc). The bytes are mapped,
not copied, and only metadata passes through vLLM's RPC, so nothing is pickled.
"""

import gc
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from raypipe.engines.lifetime import die_with_engine
from raypipe.weights import Bucket, unpack


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: `path` of the memory file, and `metadata` as in `raypipe.weights.Bucket`."""

    path: str
    metadata: str


class SharedMemoryReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    model: Any  # a vLLM model: an nn.Module with `load_weights`

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        # vLLM keeps tensors until their layer is complete, perhaps past the end of this call; the mapping lives as long
        # as they do.
        with open(update_info.path, "rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        self.model.load_weights(unpack(Bucket(update_info.metadata, data)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            # On CPU the head multiplies by its own packed copy of the weight. With tied embeddings the checkpoint holds
            # no head, so vLLM leaves the copy of the old weights: make it anew from the embedding.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        gc.collect()  # vLLM leaves what it has loaded in reference cycles: 20 MiB of a model of 2 after some updates

    def shutdown(self) -> None:
        pass


class Worker:
    """vLLM mixes this into its worker class. It adds no method: what the import does is the point."""


die_with_engine()
WeightTransferEngineFactory.register_engine("object_store", SharedMemoryReceiver)
