"""The feed: one rank's rows, iteration after iteration, each plan opened ahead of its turn.

In: split iterators from the plan server. Out: an iteration's rows as they arrive. A Ray Data plan takes seconds to
start and starts only when every rank opens its iterator, so a thread opens iteration k+1's when it is k's turn; its
requests wait at the engines' gate. The switch then costs milliseconds. (The seconds are imports of Ray Data in three
new processes, about 1 CPU-second each. None can be had warm: Ray gives an actor no process that has run anything.)
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray

_END = object()


class Feed:
    """Args:
    server: handle of the PlanServer actor.
    rank, attempt: this learner process, and how often its group has been started.
    last: the last iteration that there is.
    ahead: how many plans wait behind the one that is read.
    before: how many plans before that one may still be read (see `carry.py`).
    """

    def __init__(self, server: Any, rank: int, attempt: int, last: int, ahead: int = 1, before: int = 0):
        self.server, self.rank, self.attempt, self.last, self.ahead = server, rank, attempt, last, ahead
        self.before = before
        self.queues: dict[int, queue.Queue] = {}
        # A block of each of the last plans: who holds nothing of a plan when it ends (PlanServer) keeps its connection.
        self.held: dict[int, ray.ObjectRef] = {}
        self.lock = threading.Lock()

    def rows(self, iteration: int) -> Iterator[list[dict[str, Any]]]:
        """Rows of an iteration, as they arrive, until none is left. Raises whatever the plan raised."""
        take, ended = self.taker(iteration), False
        while not ended:
            rows, ended = take(60.0)
            if rows:
                yield rows

    def taker(self, iteration: int) -> Callable[[float], tuple[list[dict[str, Any]], bool]]:
        """A function that returns the rows which have arrived, after a wait of at most its argument in seconds for one,
        and whether none will follow. Raises whatever the plan raised."""
        # A plan that was opened ahead of its turn runs by now; one that was not (the first) should start undisturbed,
        # and has the next one opened by its first row.
        opened = iteration in self.queues
        for soon in range(iteration, iteration + self.ahead + opened):
            self._open(soon)
        for over in [each for each in list(self.held) if each < iteration - 1 - self.before]:
            del self.held[over]
        arrived = self.queues[iteration]

        def take(seconds: float) -> tuple[list[dict[str, Any]], bool]:
            rows: list[dict[str, Any]] = []
            with contextlib.suppress(queue.Empty):
                while (item := arrived.get(block=seconds > 0 and not rows, timeout=seconds)) is not _END:
                    if isinstance(item, BaseException):
                        raise item
                    rows += item
                del self.queues[iteration]
                return rows, True
            return rows, False

        return take

    def _open(self, iteration: int) -> None:
        with self.lock:
            if iteration > self.last or iteration in self.queues:
                return
            self.queues[iteration] = queue.Queue()
        threading.Thread(target=self._read, args=(iteration,), daemon=True, name=f"feed-{iteration}").start()

    def _read(self, iteration: int) -> None:
        out = self.queues[iteration]
        try:
            shard = ray.get(self.server.iterator.remote(iteration, self.attempt, self.rank))
            if shard is not None:
                for block in blocks(shard):
                    self.held[iteration] = block
                    out.put([row for row in ray.get(block).to_pylist() if row["finish_reason"] != "unused"])
                    self._open(iteration + self.ahead)
            self._open(iteration + self.ahead)
            out.put(_END)
        except BaseException as error:  # handed to the rank's main thread, which raises it
            out.put(error)


def blocks(shard: Any) -> Iterator[ray.ObjectRef]:
    """References to the blocks of a split iterator, as they arrive. (Ray Data's `iter_batches` leaves a thread behind
    for each iterator that prefetches nothing, and with prefetching a block waits for the next one.)"""
    bundles, _, executor = shard._to_ref_bundle_iterator()
    try:
        for bundle in bundles:
            yield from bundle.block_refs
    finally:
        shard._on_iteration_end(executor)
