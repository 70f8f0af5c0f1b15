"""Attempts: the lives of the learner group, and what its ranks and the driver tell each other through the plan server.

In: ranks that begin, report, fail and say what they do; a driver that asks, and gives orders. Out: each hears what it
needs. A group that loses a rank starts again as a new attempt, from the newest checkpoint, and what an earlier attempt
still says is not heard. Pure bookkeeping, safe to call from many threads.
"""

import threading
import time
from typing import Any, NamedTuple


class Told(NamedTuple):
    """What the driver hears.

    attempt: number of the newest attempt, from 0.
    first: iterations that were trained when it began; None while it still loads its state.
    records: of all ranks, in rank order, for the iteration that was asked for; None: not there yet.
    trouble: what ended the attempt before, as far as ranks could say.
    fruitless: attempts in a row that ended before they finished an iteration.
    pulses: what each rank said last of itself, with `at`, seconds since the epoch.
    """

    attempt: int
    first: int | None
    records: list[Any] | None
    trouble: str
    fruitless: int
    pulses: dict[int, dict[str, Any]]


class Attempts:
    """Args:
    ranks: size of the learner group.
    number: of the first attempt; larger where another process counted earlier ones.
    """

    def __init__(self, ranks: int, number: int = 0):
        self.ranks, self.number, self.begun = ranks, number, False
        self.first: int | None = None
        self.reports: dict[int, dict[int, Any]] = {}  # records by iteration and rank
        self.finished = self.fruitless = 0
        self.trouble = self.error = ""
        self.pulses: dict[int, dict[str, Any]] = {}
        self.order = ""
        self.news = threading.Condition()

    def begin(self) -> int:
        """A new attempt, whose number is returned."""
        with self.news:
            self.fruitless = self.fruitless + 1 if self.begun and not self.finished else 0
            self.trouble, self.error = self.error, ""
            self.number, self.begun = self.number + self.begun, True
            self.first, self.finished = None, 0
            self.pulses = {}
            self.news.notify_all()
            return self.number

    def starts_at(self, attempt: int, iteration: int) -> None:
        """The attempt has `iteration` trained iterations behind it, and does the later ones (again)."""
        with self.news:
            if attempt == self.number:
                self.first = iteration
                # What is complete and stays true is for the driver to take.
                self.reports = {
                    k: found for k, found in self.reports.items() if k < iteration and len(found) == self.ranks
                }
                self.news.notify_all()

    def failed(self, attempt: int, rank: int, error: str) -> None:
        """What ends a rank. The first to speak is believed: others fail because it is gone."""
        with self.news:
            if attempt == self.number and not self.error:
                self.error = f"rank {rank}: {error}"

    def report(self, attempt: int, iteration: int, rank: int, record: Any) -> bool:
        """A rank's record of a finished iteration; returns whether all ranks have now reported it."""
        with self.news:
            if attempt != self.number:
                return False
            found = self.reports.setdefault(iteration, {})
            found[rank] = record
            complete = len(found) == self.ranks
            self.finished += complete
            self.news.notify_all()
            return complete

    def told(self, iteration: int, attempt: int, timeout_s: float) -> Told:
        """Returns once an attempt other than `attempt` knows where it starts, or all ranks have reported `iteration`
        (then those records are the caller's), or after `timeout_s`."""

        def is_there() -> bool:
            return len(self.reports.get(iteration, {})) == self.ranks

        with self.news:
            self.news.wait_for(lambda: is_there() or (self.number != attempt and self.first is not None), timeout_s)
            records = [record for _, record in sorted(self.reports.pop(iteration).items())] if is_there() else None
            return Told(self.number, self.first, records, self.trouble, self.fruitless, dict(self.pulses))

    def pulse(self, attempt: int, rank: int, state: dict[str, Any], heard: str, timeout_s: float) -> str:
        """A rank says what it does, and hears the driver's order once it is another than it has `heard`; "" is none."""
        with self.news:
            if attempt == self.number:
                self.pulses[rank] = {**state, "at": time.time()}
            self.news.wait_for(lambda: self.order != heard, timeout_s)
            return self.order

    def give(self, order: str) -> None:
        """An order to all ranks, now and later: "stop", or "stacks N" for their stacks, in the pulse."""
        with self.news:
            self.order = order
            self.news.notify_all()
