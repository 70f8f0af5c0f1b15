"""Ends of a run before its last iteration. Ctrl-C and SIGTERM: the first asks for an end in good order, a second one
ends it at once.

In: signals. Out: `Signals.received`, which the driver looks at between waits.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any


class RunStopped(Exception):
    """The run was asked to end, and did. `code`: exit status, 128 and the signal's number."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Stalled(RuntimeError):
    """Nothing has moved for watchdog.fail_s."""


class Signals:
    """Takes the signals while its block runs; in the main thread alone, since no other one gets any."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._take) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # Not by print, which the signal may have come amid.
        os.write(
            2, f"{self.received.name}: the run saves its state and ends; once more, and it ends at once\n".encode()
        )
