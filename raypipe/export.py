"""Models in Hugging Face form: a checkpoint's `hf/` (the policy; loads with `from_pretrained` and in vLLM), and where
there are any `critic/` (likewise, with a value head) and `adapter/` (as peft has it).

In: a learner. Out: functions that write its models as they are now. Decision: taking the weights and writing them are
two steps, since all ranks take part in the first, and training goes on during the second.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypipe.lora import save_adapters
from raypipe.weights import iterate_full_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from raypipe.learner import Learner


def exports_of(learner: "Learner", target: Path, write: bool) -> list[Callable[[], None]]:
    """Functions that write the models to `target` in Hugging Face form, without the learner; all ranks call this, one
    of them with `write`, and it alone gets any."""
    model = learner.config.model
    exports = [export(target / "hf", learner.policy.module.model, model.path, model.path, write)]
    if learner.critic:
        source = learner.config.critic.path or model.path
        exports.append(export(target / "critic", learner.critic.module.model, source, model.path, write))
    if model.lora_rank:
        exports.append(save_adapters(learner.policy.module.model, target / "adapter", model, write))
    return exports if write else []


def export(target: Path, model: "PreTrainedModel", source: str, tokenizer: str, write: bool) -> Callable[[], None]:
    """Takes whole weights, LoRA merged, in the dtype of the model in `source`; the function that it returns saves them
    with config and tokenizer.

    All ranks call it, one of them with `write`; it alone holds the weights, on CPU.
    """
    config = json.loads((Path(source) / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights: dict[str, Tensor] = {}
    for name, tensor in iterate_full_parameters(model):
        if write:
            weights[name] = tensor.to("cpu", dtype, copy=True).contiguous()

    def save() -> None:
        from transformers import AutoTokenizer

        # A model of the same kind without weights, since the learner's own is at work: FSDP swaps its parameters.
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(model.config)).to(dtype)
        if model.can_generate():
            empty.generation_config = model.generation_config
        empty.save_pretrained(target, state_dict=weights)
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False, local_files_only=True).save_pretrained(target)

    return save
