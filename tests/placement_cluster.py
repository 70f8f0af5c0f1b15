"""A cluster of three labelled nodes in one process: prints on which of them a run's actors are placed, as JSON.

A program of its own: Ray can be connected to one cluster a process, and the tests' Ray is another. Engines are placed,
not awaited: they die of a model that is not there.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors as actor_table
from ray.cluster_utils import Cluster
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer

from raypipe.config import Config
from raypipe.config_file import load_config
from raypipe.engines.vllm import start_engines
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.residents import start_ray
from raypipe.resources import demands, find_machine, missing
from raypipe.runtime import learner_scaling
from raypipe.scorer import start_scorers

PLACED = ("VLLMEngine", "Scorer", "GraderHost", "RayTrainWorker", "WeightStore")


def main(config_path: str, folder: str) -> None:
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "labels": {"pool": "cpu"}, "include_dashboard": False},
    )
    try:
        nodes.add_node(num_cpus=4, num_gpus=4, labels={"pool": "engines"})
        nodes.add_node(num_cpus=4, labels={"pool": "learners"})
        nodes.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = nodes.address
        config = load_config(config_path)
        machine = find_machine()
        lacks = missing(demands(config, machine), machine)
        placed = place(config, machine, folder)
        # Of the nodes of one machine the driver is connected to any.
        here = ray.get_runtime_context().get_node_id()
        driver = next(node["Labels"]["pool"] for node in ray.nodes() if node["NodeID"] == here)
        print(json.dumps({"lacks": lacks, "placed": placed, "driver": driver}))
    finally:
        ray.shutdown()
        nodes.shutdown()


def place(config: Config, machine: Any, folder: str) -> dict[str, list[str]]:
    """The pool of each actor that holds what the config places, by its class."""
    start_ray(config, 0)
    name = config.run.name
    started = [*start_engines(config, name), *(actor for role in start_scorers(config, 0).values() for actor in role)]
    dispatcher = start_dispatcher(config.grade, (2, 2), name, cpus_per_host=1)
    ray.get(dispatcher.start.remote())
    until(lambda: len(pools()["VLLMEngine"]) == config.engine.count and len(pools()["Scorer"]) == 1)
    for actor in started:
        ray.kill(actor)
    [rank] = [demand for demand in demands(config, machine) if demand.actor == "learner rank"]
    scaling = learner_scaling(rank)
    TorchTrainer(lambda: None, scaling_config=scaling, run_config=TrainRunConfig(name=name, storage_path=folder)).fit()
    found = pools()
    ray.get(dispatcher.close.remote())
    return {kind: sorted(found[kind]) for kind in PLACED}


def pools() -> dict[str, list[str]]:
    """Class of an actor -> the pool of each one that has a node."""
    labels = {node["NodeID"]: node["Labels"].get("pool", "") for node in ray.nodes()}
    found: dict[str, list[str]] = defaultdict(list)
    for actor in actor_table().values():
        if actor["Address"]["NodeID"] in labels:
            found[actor["ActorClassName"].rpartition(".")[2]].append(labels[actor["Address"]["NodeID"]])
    return found


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not placed: {dict(pools())}"
        time.sleep(0.1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
