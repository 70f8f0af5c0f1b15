"""Checkpoints: the state to go on from, and the models in Hugging Face form.

In: a learner. Out: `checkpoints/step_N/` with `hf/` (the policy; loads with `from_pretrained` and in vLLM), `critic/`
and `adapter/` where there are any, and `state/` (torch distributed checkpoint; loads on any number of ranks). A
checkpoint is written under a temporary name and renamed when whole, so that a folder called step_N is never half a
checkpoint; older ones are deleted last.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from raypipe.lora import save_adapters
from raypipe.weights import iterate_full_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from raypipe.learner import Learner


def save(folder: Path, iteration: int, learner: "Learner") -> Path:
    """Writes `folder/step_{iteration}`; all ranks call it. `iteration` iterations have been trained."""
    config = learner.config
    target, partial = folder / f"step_{iteration}", folder / f".step_{iteration}.partial"
    writes = dist.get_rank() == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(state_of(learner), checkpoint_id=partial / "state")
    export(partial / "hf", learner.policy.module.model, config.model.path, config.model.path, writes)
    if learner.critic:
        source = config.critic.path or config.model.path
        export(partial / "critic", learner.critic.module.model, source, config.model.path, writes)
    if config.model.lora_rank:
        save_adapters(learner.policy.module.model, partial / "adapter", config.model, writes)
    if writes:
        (partial / "progress.json").write_text(json.dumps({"iteration": iteration, "kl_coef": learner.kl_coef}))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in steps(folder)[: -config.checkpoint.keep_last]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def state_of(learner: "Learner") -> dict[str, Any]:
    """Models and optimizers as DCP takes them."""
    found = {"policy": learner.policy, **({"critic": learner.critic} if learner.critic else {})}
    parts = {name: get_state_dict(trainee.module, trainee.optimizer) for name, trainee in found.items()}
    return {name: {"model": model, "optimizer": optimizer} for name, (model, optimizer) in parts.items()}


def export(target: Path, model: "PreTrainedModel", source: str, tokenizer: str, write: bool) -> None:
    """Saves whole weights, LoRA merged, in the dtype of the model in `source`, with config and tokenizer.

    All ranks call it, one of them with `write`; it alone holds the weights, on CPU.
    """
    from transformers import AutoTokenizer

    config = json.loads((Path(source) / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_full_parameters(model):
        if write:
            weights[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    if write:
        model.save_pretrained(target, state_dict=weights)
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False, local_files_only=True).save_pretrained(target)


def load(folder: Path, learner: "Learner") -> int:
    """Restores the newest checkpoint into the learner; all ranks call it.

    Returns the iterations trained so far: 0, and nothing restored, where there is no checkpoint.
    """
    trained = trained_iterations(folder)
    if not trained:
        return 0
    newest, state = steps(folder)[-1], state_of(learner)
    dcp.load(state, checkpoint_id=newest / "state")
    for name, part in state.items():
        trainee = learner.policy if name == "policy" else learner.critic
        assert trainee is not None
        set_state_dict(
            trainee.module, trainee.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
        )
    learner.kl_coef = json.loads((newest / "progress.json").read_text())["kl_coef"]
    return trained


def trained_iterations(folder: Path) -> int:
    """Iterations that the newest checkpoint in `folder` has behind it; 0 without one."""
    found = steps(folder)
    return json.loads((found[-1] / "progress.json").read_text())["iteration"] if found else 0


def steps(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if (path / "progress.json").exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))
