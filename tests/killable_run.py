"""A training run in one process that may be killed at any moment: real prompts' order, engine script, learner,
checkpoints and run folder, without Ray."""

import asyncio
import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from learner_ranks import in_chunks, parameters

from raypipe import checkpoint
from raypipe.carry import planned
from raypipe.checkpoint_files import find_start
from raypipe.config import CheckpointConfig, Config, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from raypipe.engines.scripted import ScriptedEngine
from raypipe.learner import Learner, is_checkpoint
from raypipe.plans import iteration_blocks
from raypipe.prompts import PromptOrder
from raypipe.run_folder import open_run
from raypipe.scripted import scripted_prompts
from raypipe.streaming import Spans

PROMPTS, ITERATIONS = 10, 12


def config_for(model: Path, folder: Path) -> Config:
    return Config(
        run=RunConfig(name=folder.name, dir=str(folder.parent), resume="auto", iterations=ITERATIONS),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=["scripted"], train_batch_size=4),
        rollout=RolloutConfig(n=4, max_response_length=16),
        train=TrainConfig(lr=1e-3, micro_batch_tokens=256, lr_schedule="linear"),
        checkpoint=CheckpointConfig(every=2),
    )


def scripted_rows(config: Config, iteration: int) -> list[dict]:
    """An iteration's rows as they come out of Grade, by the real order of prompts and the scripted engine."""
    order = PromptOrder(PROMPTS, config.data.train_batch_size, config.run.seed, config.data.shuffle)
    positions = planned(config, iteration)
    blocks = iteration_blocks(config, iteration, positions, order, None, scripted_prompts(PROMPTS), [])
    rows = [row for block in blocks for row in block.to_pylist()]

    async def respond() -> list[dict]:
        engine = ScriptedEngine("engine-0")
        await engine.open_gate(iteration)
        return [await engine.generate(row | {"plan": "plan", "max_tokens": 16}) for row in rows]

    responses = asyncio.run(respond())
    return [
        row | response | {"score": response["response_ids"][0] / 64, "grade_status": "ok"}
        for row, response in zip(rows, responses, strict=True)
    ]


def train(model: Path, folder: Path) -> None:
    """Trains to the end, from the last checkpoint if there is one. `folder` is the run's; beside it, `<name>.seen` gets
    the prompts of each iteration that is begun, and `<name>.npz` the parameters."""
    os.setsid()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = config_for(model, folder)
    run = open_run(config, dataclasses.asdict(config))
    start = find_start(run.checkpoints)
    run.resume_at(start.iteration)
    learner = Learner(config, torch.device("cpu"))
    assert checkpoint.load(run.checkpoints, learner).iteration == start.iteration
    writer = checkpoint.CheckpointWriter(run.checkpoints, learner, run.metrics)
    for iteration in range(start.iteration, ITERATIONS):
        rows = scripted_rows(config, iteration)
        with folder.with_suffix(".seen").open("a") as file:
            file.write(json.dumps([iteration, [row["prompt_id"] for row in rows]]) + "\n")
        metrics = learner.iterate(iteration, in_chunks(rows, 100), Spans())["metrics"]
        if is_checkpoint(config, iteration + 1):
            writer.save(iteration + 1)
        run.append_metrics({"iteration": iteration, **{k: v for k, v in metrics.items() if math.isfinite(v)}})
    assert writer.wait() == ""
    np.savez(folder.with_suffix(".npz"), **parameters(learner.policy))
