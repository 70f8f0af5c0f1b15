"""Runs the learner on 1 or more gloo ranks, each in a process of its own, without Ray, and returns its parameters."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raypipe.config import Config
from raypipe.learner import Learner
from raypipe.weights import iterate_full_parameters


class Job(NamedTuple):
    """A training from the start: `iterations[i][r]` are the rows of rank r in iteration i."""

    config: Config
    iterations: list[list[list[dict]]]


def train_on_ranks(world: int, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    """Each job's {"parameters", "metrics"} by its name, as rank 0 of `world` saw them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        mp.spawn(_rank, (world, port, jobs, result), nprocs=world)
        return torch.load(result, weights_only=False)


def _rank(rank: int, world: int, port: int, jobs: dict[str, Job], result: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = {}
    for name, job in jobs.items():
        learner = Learner(job.config, torch.device("cpu"))
        metrics = [learner.iterate(i, rows[rank])["metrics"] for i, rows in enumerate(job.iterations)]
        parameters = {name: tensor.numpy() for name, tensor in iterate_full_parameters(learner.policy.model)}
        found[name] = {"parameters": parameters, "metrics": metrics}
    if rank == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()
