"""What a run asks of the machine: which actor wants which CPUs and GPUs of which nodes, and whether they are there.

In: a config and the nodes of the cluster. Out: demands, one line each. On a machine that raypipe starts Ray on
itself, CPUs are only counted, not partitioned, so a laptop may run more processes than it has cores; on a cluster that
others share (`RAY_ADDRESS`), what is asked for must be there. GPUs must be there always.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from raypipe.config import Config, engine_count, grader_actors, scorer_roles
from raypipe.placement import Node, satisfies

# With pipeline.colocate, of each GPU: exact in binary, and to be paired in one way only (see colocate.py).
ENGINE_SHARE, RANK_SHARE = 0.75, 0.25
# The actors of a plan without a learner.
SAMPLING_ACTORS = ("engine", "grader host")


@dataclass(frozen=True)
class Demand:
    """`count` actors of one kind, each reserving `cpus` and `gpus` on a node with `labels`, the config's
    `{section}.node_labels`."""

    actor: str
    count: int
    cpus: float
    gpus: float
    section: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The nodes of the cluster; `local` if raypipe starts Ray on this machine itself, which then is the only one."""

    nodes: tuple[Node, ...]
    local: bool

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)


def find_machine() -> Machine:
    """The cluster of `RAY_ADDRESS` (connects to it), else this machine."""
    if os.environ.get("RAY_ADDRESS"):
        import ray

        ray.init(ignore_reinit_error=True, log_to_driver=False)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        ray.shutdown()  # the run connects again, with its namespace and environment
        return Machine(tuple(node_of(node["Resources"], node["Labels"]) for node in nodes), local=False)
    import torch

    return Machine((Node(len(os.sched_getaffinity(0)), torch.cuda.device_count()),), local=True)


def node_of(resources: Mapping[str, float], labels: Mapping[str, str]) -> Node:
    return Node(resources.get("CPU", 0), resources.get("GPU", 0), labels)


def demands(config: Config, machine: Machine) -> list[Demand]:
    engine, train, grade, scorer = config.engine, config.train, config.grade, config.scorer
    one = 1.0 if machine.gpus else 0.0  # GPUs by default, where there are some
    engine_share, rank_share = (ENGINE_SHARE, RANK_SHARE) if config.pipeline.colocate else (1.0, 1.0)
    engine_gpus = one * engine_share * engine.tensor_parallel_size if engine.num_gpus < 0 else engine.num_gpus
    rank_gpus = one * rank_share if train.gpus_per_rank < 0 else train.gpus_per_rank
    scorer_gpus = one if scorer.num_gpus < 0 else scorer.num_gpus
    scorers, hosts = scorer.count * len(scorer_roles(config)), grader_actors(config)[0]
    found = [
        Demand("engine", engine_count(config), engine.num_cpus, engine_gpus, "engine", engine.node_labels),
        Demand("learner rank", train.ranks, train.cpus_per_rank, rank_gpus, "train", train.node_labels),
        Demand("grader host", hosts, grade.processes, 0.0, "grade", grade.node_labels),
        Demand("scorer", scorers, scorer.num_cpus, scorer_gpus, "scorer", scorer.node_labels),
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
    return lacks or [sentence for demand in asked if (sentence := misplaced(demand, machine))]


def misplaced(demand: Demand, machine: Machine) -> str:
    """Why the actors of `demand` find no place on the nodes that they may run on, though the cluster as a whole has
    what they ask for; empty if they do. Other actors on these nodes are not looked at."""
    key, labels = f"{demand.section}.node_labels", dict(demand.labels)
    if machine.local:
        return (
            f"{key}={labels}: a Ray that raypipe starts on this machine has no labels; set RAY_ADDRESS to run on a "
            f"cluster, or leave {key} out"
            if labels
            else ""
        )
    nodes = [node for node in machine.nodes if satisfies(node.labels, labels)]
    room = sum(node.room(demand.cpus, demand.gpus) for node in nodes)
    if not nodes:
        known = sorted({f"{name}={value}" for node in machine.nodes for name, value in node.labels.items()})
        known = [label for label in known if not label.startswith("ray.io/node-id=")]
        return (
            f"{key}={labels}: no node of the cluster has these labels; it has {', '.join(known) or 'none'}; start a "
            "node with `ray start --labels=NAME=VALUE`, or change the key"
        )
    if room < demand.count:
        return (
            f"{demand.actor}: {demand.count} are asked for, each with {demand.cpus:g} CPUs and {demand.gpus:g} GPUs of "
            f"one node, and the nodes {f'with {labels} ' if labels else ''}have room for {room:g}; lower what each "
            f"asks for, or change {key}"
        )
    return ""
