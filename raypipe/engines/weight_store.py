"""The newest weights, for an engine that starts again: a Ray actor that keeps their buckets alive in the object store.

In: references from learner rank 0 after each update. Out: the same, to an engine that died. A module of its own with
nothing to import, so that the actor's process stays small.
"""

import ray


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
        return self.newest
