"""The pulse: a learner rank's line to the plan server, on a thread of its own.

In: what the rank is doing. Out: the driver knows it, however long a phase lasts, and the rank knows when it is to stop.
"""

import os
import threading
import time
from typing import Any

import ray

from raypipe.streaming import Spans
from raypipe.watchdog import stacks

PULSE_S = 5.0


class Pulse:
    """Args:
    server: handle of the PlanServer actor.
    rank, attempt: of this learner process.
    spans: knows the phase that the rank is in.

    Attributes:
        stopping: set once the run is to end.
    """

    def __init__(self, server: Any, rank: int, attempt: int, spans: Spans):
        self.server, self.rank, self.attempt, self.spans = server, rank, attempt, spans
        self.work = 0
        self.stopping = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def worked(self) -> None:
        """A piece of work is done: the phase lasts, but moves."""
        self.work += 1

    def _beat(self) -> None:
        heard = ""
        while not self.ended.is_set():
            state = {
                "phase": self.spans.phase,
                "since": self.spans.since,
                "work": self.work,
                "pid": os.getpid(),
                "node": ray.util.get_node_ip_address(),
                "stacks": stacks() if heard.startswith("stacks") else [],
            }
            try:
                heard = ray.get(self.server.pulse.remote(self.attempt, self.rank, state, heard, PULSE_S))
            except ray.exceptions.RayError:  # it starts again; this attempt ends with the plans that it held
                time.sleep(1.0)
            if heard == "stop":
                self.stopping.set()

    def end(self) -> None:
        self.ended.set()
