"""LoRA (arXiv 2106.09685) through peft: adapters go into the model in place, and are saved in peft's own form.

In: a causal LM and `model.lora_*`. Out: the same model, of whose parameters only the adapters are trained. It keeps its
class, so nothing else needs to know; `weights.iterate_full_parameters` gives its weights with the adapters merged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from raypipe.config import ModelConfig
from raypipe.weights import full

ADAPTER = "default"


def lora_config(config: ModelConfig) -> Any:
    """peft's LoraConfig."""
    from peft import LoraConfig  # takes seconds to import

    targets = list(config.lora_targets)
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # any number serves
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )


def add_adapters(model: PreTrainedModel, config: ModelConfig) -> None:
    """Puts an adapter of zero effect on each target layer and freezes all else.

    Raises ValueError if a target is unknown, not a linear layer, or the head.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    problem = f"model.lora_targets={list(config.lora_targets)}"
    try:
        inject_adapter_in_model(lora_config(config), model, ADAPTER)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    for name, module in model.named_modules():
        adapted = isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
        if adapted and (not isinstance(module, Linear) or module is model.get_output_embeddings()):
            raise ValueError(
                f"{problem} takes in {name}; only linear layers other than the head can be adapted, since the adapters "
                "are merged into them for the engines: leave it out"
            )


def save_adapters(model: nn.Module, target: Path, config: ModelConfig, write: bool) -> Callable[[], None]:
    """Takes the adapters; the function that it returns writes them as `PeftModel.from_pretrained` reads them. All ranks
    call it, one of them with `write`."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            tensor = full(parameter)
            if write:
                weights[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = tensor.to("cpu", copy=True)

    def save() -> None:
        target.mkdir(parents=True)
        save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
        lora_config(config).save_pretrained(str(target))

    return save
