"""What a run asks of the machine: which actor wants which CPUs and GPUs, and whether they are there.

In: a config and the CPUs and GPUs of the cluster. Out: demands, one line each. On a machine that raypipe starts Ray on
itself, CPUs are only counted, not partitioned, so a laptop may run more processes than it has cores; on a cluster that
others share (`RAY_ADDRESS`), what is asked for must be there. GPUs must be there always.
"""

import os
from dataclasses import dataclass

from raypipe.config import Config, grader_actors, scorer_roles

# With pipeline.colocate, of each GPU: exact in binary, and to be paired in one way only (see colocate.py).
ENGINE_SHARE, RANK_SHARE = 0.75, 0.25
# The actors of a plan without a learner.
SAMPLING_ACTORS = ("engine", "grader host")


@dataclass(frozen=True)
class Demand:
    """`count` actors of one kind, each reserving `cpus` and `gpus`."""

    actor: str
    count: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Machine:
    """CPUs and GPUs of the cluster; `local` if raypipe starts Ray on this machine itself."""

    cpus: float
    gpus: float
    local: bool


def find_machine() -> Machine:
    """The cluster of `RAY_ADDRESS` (connects to it), else this machine."""
    if os.environ.get("RAY_ADDRESS"):
        import ray

        ray.init(ignore_reinit_error=True, log_to_driver=False)
        total = ray.cluster_resources()
        ray.shutdown()  # the run connects again, with its namespace and environment
        return Machine(total.get("CPU", 0), total.get("GPU", 0), local=False)
    import torch

    return Machine(len(os.sched_getaffinity(0)), torch.cuda.device_count(), local=True)


def demands(config: Config, machine: Machine) -> list[Demand]:
    engine, train, grade, scorer = config.engine, config.train, config.grade, config.scorer
    engine_gpus = float(engine.tensor_parallel_size) if machine.gpus else 0.0
    scorer_gpus = rank_gpus = 1.0 if machine.gpus else 0.0
    if config.pipeline.colocate:
        engine_gpus, rank_gpus = engine_gpus * ENGINE_SHARE, rank_gpus * RANK_SHARE
    scorers = scorer.count * len(scorer_roles(config))
    found = [
        Demand("engine", engine.count, engine.num_cpus, engine_gpus if engine.num_gpus < 0 else engine.num_gpus),
        Demand(
            "learner rank",
            train.ranks,
            train.cpus_per_rank,
            rank_gpus if train.gpus_per_rank < 0 else train.gpus_per_rank,
        ),
        Demand("grader host", grader_actors(config)[0], grade.processes, 0.0),
        Demand("scorer", scorers, scorer.num_cpus, scorer_gpus if scorer.num_gpus < 0 else scorer.num_gpus),
        # Stage actors, the plan server, the grade dispatcher and Ray's own controllers ask for no CPU.
    ]
    return [demand for demand in found if demand.count]


def sampling_demands(config: Config, machine: Machine) -> list[Demand]:
    """What generating and grading ask for, without a learner."""
    return [demand for demand in demands(config, machine) if demand.actor in SAMPLING_ACTORS]


def missing(asked: list[Demand], machine: Machine) -> list[str]:
    """What the machine lacks, one sentence each; empty if the run fits."""
    cpus = sum(d.count * d.cpus for d in asked)
    gpus = sum(d.count * d.gpus for d in asked)
    lacks = []
    if gpus > machine.gpus:
        lacks.append(
            f"{gpus:g} GPUs are asked for and {machine.gpus:g} are there; lower engine.count, engine.num_gpus, "
            "train.ranks, train.gpus_per_rank or scorer.num_gpus (fractions share a GPU)"
        )
    if cpus > machine.cpus and not machine.local:
        lacks.append(
            f"{cpus:g} CPUs are asked for and {machine.cpus:g} are there; lower grade.workers, grade.processes, "
            "engine.num_cpus or train.cpus_per_rank"
        )
    return lacks
