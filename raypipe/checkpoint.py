"""Checkpoints: the state to go on from, and the policy in Hugging Face form.

In: a sharded policy and its optimizer. Out: `checkpoints/step_N/` with `hf/` (loads with `from_pretrained` and in vLLM)
and `state/` (torch distributed checkpoint; loads on any number of ranks). A checkpoint is written under a temporary
name and renamed when whole, so that a folder called step_N is never half a checkpoint; older ones are deleted last.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from raypipe.modeling import Policy


def save(folder: Path, iteration: int, policy: Policy, optimizer: Optimizer, source: str, keep_last: int) -> Path:
    """Writes `folder/step_{iteration}`; all ranks call it. `iteration` iterations have been trained.

    Args:
        source: the model folder the run started from; its tokenizer is copied beside the weights.
        keep_last: how many checkpoints remain afterwards.
    """
    target, partial = folder / f"step_{iteration}", folder / f".step_{iteration}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial / "state")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(policy.model, options=options)
    if dist.get_rank() == 0:
        export(partial / "hf", policy, weights, source)
        (partial / "progress.json").write_text(json.dumps({"iteration": iteration}))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in steps(folder)[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def export(target: Path, policy: Policy, weights: dict[str, torch.Tensor], source: str) -> None:
    """Saves full weights in the dtype of the model they came from, with config and tokenizer."""
    from transformers import AutoTokenizer

    config = json.loads((Path(source) / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    policy.model.save_pretrained(target, state_dict=weights)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True).save_pretrained(target)


def load(folder: Path, policy: Policy, optimizer: Optimizer) -> int:
    """Restores the newest checkpoint into `policy` and `optimizer` in place; all ranks call it.

    Returns the iterations trained so far: 0, and nothing restored, where there is no checkpoint.
    """
    trained = trained_iterations(folder)
    if not trained:
        return 0
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=steps(folder)[-1] / "state")
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return trained


def trained_iterations(folder: Path) -> int:
    """Iterations that the newest checkpoint in `folder` has behind it; 0 without one."""
    found = steps(folder)
    return json.loads((found[-1] / "progress.json").read_text())["iteration"] if found else 0


def steps(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if (path / "progress.json").exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))
