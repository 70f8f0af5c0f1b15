"""How large a call may be and how long it may take, learnt from the calls before it.

`timeout_s` is what one sample may take when it is called alone, and only that marks a sample. A call of several is a bet
that none of them hangs. Waiting `timeout_s` for each member before the bet is called off would hold its process for
minutes, so it is off after twice what nearly all calls took (at least a second, at most `timeout_s`): the call is
stopped and its samples are repeated one by one. A wrong guess costs that time again and nothing else; wrong guesses
raise the measure, so they become rare. A hanging sample is thus marked about a second after `timeout_s`.
"""

import math
from collections import deque

RECENT = 50
LEAST_PATIENCE_S = 1.0


class Pace:
    """The recent calls of one grader."""

    def __init__(self, timeout_s: float, max_batch: int):
        self.timeout_s, self.max_batch = timeout_s, max_batch
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.first_seconds = 0.0
        self.seconds_per_sample = 0.0

    def record(self, samples: int, seconds: float, first: bool) -> None:
        """A call that ended by itself or was stopped. `first` in its process: it may have loaded what later calls reuse."""
        if first:
            self.first_seconds = max(self.first_seconds, seconds)
            return
        self.seconds.append(seconds)
        each = seconds / samples
        self.seconds_per_sample = each if len(self.seconds) == 1 else 0.8 * self.seconds_per_sample + 0.2 * each

    def largest(self) -> int:
        """Most samples of a call, so that it takes at most half of `timeout_s` as far as is known."""
        if not self.seconds_per_sample:
            return self.max_batch
        return max(1, min(self.max_batch, int(self.timeout_s / 2 / self.seconds_per_sample)))

    def limit_s(self, samples: int, first: bool) -> float:
        """Seconds that the next call of so many samples may take."""
        if samples == 1 or (first and not self.first_seconds) or not self.seconds:
            return self.timeout_s
        nearly_all = sorted(self.seconds)[math.ceil(0.9 * len(self.seconds)) - 1]
        patience = max(LEAST_PATIENCE_S, 2 * nearly_all, 2 * self.first_seconds if first else 0.0)
        return min(self.timeout_s, patience)
