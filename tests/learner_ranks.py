"""Runs the learner on 1 or more gloo ranks, each in a process of its own, without Ray, and returns its parameters."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raypipe import checkpoint
from raypipe.batching import Layout
from raypipe.config import Config
from raypipe.learner import Learner, Trainee
from raypipe.streaming import Spans, Take
from raypipe.weights import iterate_full_parameters


class Job(NamedTuple):
    """A training from the start, or from the newest checkpoint in `load`: `iterations[i][r]` are the rows of rank r in
    its iteration i. In the end it leaves a checkpoint in `save`."""

    config: Config
    iterations: list[list[list[dict]]]
    chunk: int = 1_000_000  # rows that arrive together
    pauses: bool = False  # nothing comes for a while after each chunk
    layout: Layout | None = None  # another than the learner chooses
    load: Path | None = None
    save: Path | None = None


def in_chunks(rows: list[dict], chunk: int, pauses: bool = False) -> Take:
    """Rows as a feed would deliver them, `chunk` at a time."""
    rest, pause = list(rows), False

    def take(seconds: float) -> tuple[list[dict], bool]:
        nonlocal pause
        if pause:
            pause = False
            return [], False
        found, rest[:] = rest[:chunk], rest[chunk:]
        pause = pauses
        return found, not rest

    return take


def parameters(trainee: Trainee) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in iterate_full_parameters(trainee.module.model)}


def train_on_ranks(world: int, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    """Each job's {"parameters", "metrics", "spans"} (and "critic") by its name, as rank 0 of `world` saw them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        mp.spawn(_rank, (world, port, jobs, result), nprocs=world)
        return torch.load(result, weights_only=False)


def save_checkpoint(folder: Path, iteration: int, learner: Learner) -> Path:
    """Writes `folder/step_{iteration}` and returns it when it is whole; all ranks call it.

    Raises RuntimeError, on rank 0 at least, if it cannot be written.
    """
    writer = checkpoint.CheckpointWriter(folder, learner)
    writer.save(iteration)
    if failure := writer.wait():
        raise RuntimeError(failure)
    dist.barrier()
    return folder / f"step_{iteration}"


def _rank(rank: int, world: int, port: int, jobs: dict[str, Job], result: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = {}
    for name, job in jobs.items():
        learner = Learner(job.config, torch.device("cpu"))
        if job.layout:
            learner.layout = job.layout
        start = checkpoint.load(job.load, learner).iteration if job.load else 0
        spans = Spans()
        metrics = [
            learner.iterate(i, in_chunks(rows[rank], job.chunk, job.pauses), spans)["metrics"]
            for i, rows in enumerate(job.iterations, start)
        ]
        if job.save:
            save_checkpoint(job.save, start + len(job.iterations), learner)
        found[name] = {"parameters": parameters(learner.policy), "metrics": metrics, "spans": spans.collect()}
        if learner.critic:
            found[name]["critic"] = parameters(learner.critic)
    if rank == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()
