"""The newest weights, for an engine or scorer that starts again: a Ray actor that keeps their buckets alive in the
object store.

In: references from learner rank 0 after each update. Out: the same, to one that died. A module of its own with nothing
to import, so that the actor's process stays small.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Ray ends a named actor when its creator drops the handle. Those who read the store know it by name alone, since an
# actor whose arguments refer to objects cannot be relied on to start again.
STORES: dict[str, ActorHandle] = {}


class WeightStore:
    """Holds references alone; the bytes stay where Ray put them."""

    def __init__(self) -> None:
        self.newest: tuple[int, list[ray.ObjectRef]] | None = None

    def set(self, version: int, buckets: list[ray.ObjectRef]) -> None:
        self.newest = (version, buckets)

    def clear(self) -> None:
        """Frees the old buckets before new ones are made, so that the object store holds one copy of the model."""
        self.newest = None

    def latest(self) -> tuple[int, list[ray.ObjectRef]] | None:
        """None if nothing was published yet. Raises RuntimeError if that cannot be known: what it held died with it."""
        if self.newest is None and ray.get_runtime_context().was_current_actor_reconstructed:
            raise RuntimeError("the weight store was started again, and has had no weights since")
        return self.newest


def start_store(name: str) -> None:
    """Starts the `WeightStore` actor of that name, to live as long as this process and beside it: a node that dies with
    an engine is not to take the weights along that the engine needs to come back."""
    actor: Any = ray.remote(WeightStore)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = actor.options(name=name, num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    STORES[name] = options.remote()


async def load_newest(store: str, receiver: Any) -> bool:
    """Loads the store's weights by the receiver's start_update, update_bucket and finish_update.

    False, and nothing done, where there is no store (its name is empty) or nothing was published yet.
    """
    newest = await ray.get_actor(store).latest.remote() if store else None
    if newest is None:
        return False
    version, buckets = newest
    await receiver.start_update()
    for reference in buckets:
        await receiver.update_bucket(await reference)
    await receiver.finish_update(version)
    return True


async def ensure_version(version: int, gate: Any, load: Callable[[], Awaitable[None]]) -> None:
    """Calls `load` unless the gate is at `version` already, as it may be after a restart; it must be then."""
    if gate.version != version:
        await load()
    if gate.version != version:
        raise RuntimeError(f"the store has version {gate.version}, not {version}")
