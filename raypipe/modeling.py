"""The models that are trained: a policy that returns log-probs of given tokens and a critic that returns their values.

In: a model folder, token ids. Out: float32 log-probs and entropies, or values, of the response tokens alone. The head
and the log-softmax run over chunks of positions inside `forward`, so that a vocabulary of 150k never meets a whole
batch, and so that FSDP's hooks see one forward per micro-batch.

Shapes: N response tokens, H hidden, V vocabulary; R rows of L tokens as in `batching.py`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from raypipe.batching import Batch, Layout, lay_out
from raypipe.config import ModelConfig
from raypipe.lora import add_adapters
from raypipe.token_logprobs import token_logprobs

# Logits that exist at the same time, in elements: 256 MiB in float32.
MAX_LOGITS = 2**26
# Rows of at least 256 tokens leave about 2% of padding. Longer ones share more prompts, and attention, which costs
# L / 6H of the rest of a layer on rows of L tokens, is a small part of the work up to half the hidden size.
ROW_TOKENS, ROW_TOKENS_OF_HIDDEN = 256, 0.5


class Policy(nn.Module):
    """Args:
    model: any Hugging Face causal LM.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs of `batch.targets_N` and the entropies of the distributions they were drawn from, float32 [N].

        Args:
            temperature: divides the logits, as the engine's sampling did.
            entropy_gradient: whether the entropies carry a gradient, which costs memory.
        """
        targets_N = batch.targets_N
        hidden_NH = batch.select(hidden_states(self.model, batch))
        step = max(1, MAX_LOGITS // self.model.config.get_text_config().vocab_size)
        if len(hidden_NH) <= step:
            return self._head(hidden_NH, targets_N, temperature, entropy_gradient)
        parts = [
            checkpoint(self._head, hidden, targets, temperature, entropy_gradient, use_reentrant=False)
            for hidden, targets in zip(hidden_NH.split(step), targets_N.split(step), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _head(
        self, hidden_NH: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logits_NV = self._scaled(self.model.get_output_embeddings()(hidden_NH))
        if not entropy_gradient:
            return token_logprobs(logits_NV, targets_N, temperature)
        logits_NV = logits_NV.float() / temperature
        total_N = logits_NV.logsumexp(-1)
        entropy_N = total_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
        return logits_NV.gather(1, targets_N[:, None])[:, 0] - total_N, entropy_N

    def _scaled(self, logits_NV: Tensor) -> Tensor:
        """What some families do to logits after the head: Gemma caps, Cohere multiplies, Granite divides."""
        config = self.model.config.get_text_config()
        if cap := getattr(config, "final_logit_softcapping", None):
            logits_NV = cap * torch.tanh(logits_NV.float() / cap)
        if scale := getattr(config, "logit_scale", None):
            logits_NV = logits_NV.float() * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits_NV = logits_NV.float() / divisor
        return logits_NV


class Critic(nn.Module):
    """Args:
    model: a Hugging Face token classifier with one label, its value head.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Values of the states that `batch.targets_N` were chosen in (the tokens before each), float32 [N]."""
        hidden_NH = batch.select(hidden_states(self.model, batch))
        head: Any = self.model.score
        return head(hidden_NH).float()[:, 0].clone()  # on a view FSDP2 would lose the hook that gathers for backward


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The last hidden states of `batch`, [R, L, H]."""
    return model.base_model(
        input_ids=batch.input_ids_RL,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids_RL,
        use_cache=False,
    ).last_hidden_state


@torch.no_grad()
def keeps_samples_apart(module: nn.Module, device: torch.device) -> bool:
    """Whether what stands before a sample in its row leaves it alone, as it should by the restarting position ids.

    Some families (state-space layers, say) look at the whole row; their samples need rows of their own.

    Args:
        module: a `Policy` or `Critic`, sharded or not; all ranks call it together.
    """

    def second(first: list[int]) -> Tensor:
        batch = lay_out([[(first, []), ([8, 9], [10, 11])]], device)
        return module(batch) if isinstance(module, Critic) else module(batch, 1.0)[0]

    return torch.equal(second([1, 2, 3]), second([4, 5, 6]))


def shares_prompts(module: nn.Module, attention: str) -> bool:
    """Whether the model computes samples that share a prompt right: by a mask of its own for every layer.

    Eager attention takes another form of mask, flash attention none, and layers with a window would lose it.
    """
    model: Any = module.model
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    has_window = getattr(config, "sliding_window", None) or any(kind != "full_attention" for kind in layer_types)
    return attention == "sdpa" and model._supports_attention_backend and not has_window


def layout(modules: Sequence[nn.Module], attention: str, device: torch.device, token_budget: int) -> Layout:
    """How micro-batches of at most `token_budget` tokens are laid out so that each of `modules`, policies and critics,
    computes them right; all ranks call it."""
    if not all(keeps_samples_apart(module, device) for module in modules):
        return Layout(0, shares_prompts=False)
    if attention == "flash_attention_2":  # reads one long row sample by sample; the others compute its square
        return Layout(token_budget, shares_prompts=False)
    models: list[Any] = [module.model for module in modules]
    hidden = min(model.config.get_text_config().hidden_size for model in models)
    row_tokens = max(ROW_TOKENS, int(ROW_TOKENS_OF_HIDDEN * hidden))
    return Layout(row_tokens, all(shares_prompts(module, attention) for module in modules))


def load_policy(config: ModelConfig) -> Policy:
    """The policy of `model.path` on CPU in float32, the learner's master weights; with LoRA adapters if asked for."""
    model = AutoModelForCausalLM.from_pretrained(config.path, **_loading(config))
    if config.lora_rank:
        add_adapters(model, config)
    return Policy(_checkpointed(model, config)).train()


def load_critic(path: str | Path, config: ModelConfig) -> Critic:
    """The critic on CPU in float32, from a saved critic or from any causal LM, with a value head of zeros.

    Raises ValueError if transformers has no token classifier for this family.
    """
    try:
        with quiet_loading():  # it would report the head that a causal LM lacks
            model, info = AutoModelForTokenClassification.from_pretrained(
                path, num_labels=1, output_loading_info=True, **_loading(config)
            )
        head = model.score
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"critic.path={path}: transformers cannot put a value head on this model ({error}); name a model of "
            "another family in critic.path, with the same tokenizer"
        ) from None
    if any(name.startswith("score.") for name in info["missing_keys"]):
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return Critic(_checkpointed(model, config)).train()


def _loading(config: ModelConfig) -> dict[str, Any]:
    """Only safetensors, no remote code."""
    return {
        "dtype": torch.float32,
        "attn_implementation": config.attention,
        "use_safetensors": True,
        "trust_remote_code": False,
        "local_files_only": True,
    }


def _checkpointed(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextmanager
def quiet_loading() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def shard(
    module: Policy | Critic, device: torch.device, world: int, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> Policy | Critic:
    """Shards a policy or critic over all ranks with FSDP2, one unit a decoder layer, and moves it to `device`.

    Parameters stay float32; compute and gathers use `compute_dtype`, gradients are reduced in float32. Gradients are
    summed, not averaged, over ranks: the losses' denominators already count all ranks. Weights that are not resharded
    after forward are not after backward either: the micro-batches of a step share them, until `reshard`.
    """
    mesh = init_device_mesh(device.type, (world,))
    precision = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layer_names = set(module.model._no_split_modules or ())
    units: list[nn.Module] = [unit for unit in module.modules() if type(unit).__name__ in layer_names]
    for unit in [*units, module]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
        assert isinstance(unit, FSDPModule)  # what fully_shard has made of it
        unit.set_reshard_after_backward(reshard_after_forward, recurse=False)
        if world > 1:  # alone, FSDP would divide all gradients by 1
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
    return module.to(device)


def reshard(module: Policy | Critic) -> None:
    """Frees gathered weights; `parameters()` are this rank's shards again, as they must be when they change or are
    read."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward: `auto` is bfloat16 on GPU and float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: str) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then constant, linear or cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]
    return peak * factor
