"""Engines and learner on the same GPUs, by turns (`pipeline.colocate`).

In: the run's engines and learner ranks, one rank for each GPU of an engine. Out: a GPU that belongs to one of them at a
time. The learner alone knows when it has an iteration's last row and when its weights are done, so it gives the turns:

    generate   rows arrive, graded beside generation; the learner's weights and optimizer stay on the GPU, all else not
    sleep      every rank has its last row: engines close their gates and free weights and cache
    train      on the whole iteration; then ranks free what torch keeps for its next use
    wake       an engine makes room for weights, takes the new ones, makes room for the cache, and opens its gate

The last is the weight update itself (`VLLMEngine.start_update` and `finish_update`). Ray hands out shares of a GPU that
can be paired in one way only: two engines do not fit on one, nor do two ranks beside an engine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.config import Config
from raypipe.resources import ENGINE_SHARE
from raypipe.weights import Engines

# Seconds that an engine may wait for its GPUs before the run fails.
PLACEMENT_LIMIT_S = 600


@ray.remote(num_cpus=0)
def assigned_gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def place_engine(config: Config) -> tuple[dict[str, Any], list[str]]:
    """Reserves an engine's share of `engine.tensor_parallel_size` GPUs of one node.

    Returns the actor's options, and the ids of all of its GPUs there, of which Ray shows the actor the first alone.
    """
    cpus, count = config.engine.num_cpus, config.engine.tensor_parallel_size
    bundles = [{"GPU": ENGINE_SHARE, "CPU": cpus}] + [{"GPU": ENGINE_SHARE}] * (count - 1)
    labels = [config.engine.node_labels] * count if config.engine.node_labels else None
    group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=labels)
    if not group.wait(PLACEMENT_LIMIT_S):
        raise RuntimeError(f"no node has {count} free GPUs and {cpus:g} CPUs for an engine; see `ray status`")
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(count)]
    found = [assigned_gpus.options(num_gpus=ENGINE_SHARE, scheduling_strategy=place).remote() for place in places]
    gpus = [gpu for gpus in ray.get(found) for gpu in gpus]
    return {"num_gpus": ENGINE_SHARE, "scheduling_strategy": places[0]}, gpus


class Turns:
    """A rank's part in the turns. All ranks make one, and call it, together.

    Args:
        engines: handles of the engine actors.
        rank: this rank's number; rank 0 speaks to the engines.
        gather: collects a value of every rank, in rank order (`Learner.gather`).

    Raises RuntimeError unless each rank is on a GPU of an engine, and on one of its own.
    """

    def __init__(self, engines: Sequence[Any], rank: int, gather: Callable[[Any], list[Any]]):
        self.engines, self.rank, self.gather = list(engines), rank, gather
        node = ray.util.get_node_ip_address()
        ranks = gather([(node, str(gpu)) for gpu in ray.get_gpu_ids()])
        ready: list[dict[str, Any]] = ray.get([engine.ready.remote() for engine in engines])
        check_places([place for part in ranks for place in part], ready)

    def sleep_engines(self) -> None:
        """Puts all engines to sleep, once no rank's rows are still to come."""
        if self.rank == 0:
            Engines(self.engines).call("sleep")
        self.gather(None)

    def make_room(self) -> None:
        """Before the weight update that wakes the engines: frees the GPU memory that torch keeps for its next use."""
        torch.cuda.empty_cache()
        self.gather(None)


def check_places(ranks: Sequence[tuple[str, str]], engines: Sequence[dict[str, Any]]) -> None:
    """Raises RuntimeError unless each rank shares a GPU with an engine.

    Args:
        ranks: (node, GPU id) of the ranks; empty without GPUs.
        engines: what each said when it was ready; `gpus` are the ids of its GPUs.
    """
    theirs = [(engine["node"], gpu) for engine in engines for gpu in engine["gpus"]]
    if sorted(ranks) != sorted(theirs):
        raise RuntimeError(
            f"pipeline.colocate: learner ranks are on the GPUs {sorted(ranks)} and engines on {sorted(theirs)}, which "
            "are not the same; give the run a cluster whose GPUs nobody else uses, and no more of them than it asks for"
        )
