"""How large a call may be and how long it may take, learnt from the calls before it.

`timeout_s` is what one sample may take when it is called alone, and only that marks a sample. A call of several is a
bet that none of them hangs. Waiting `timeout_s` for each member before the bet is called off would hold its process for
minutes, so it is off after twice what nearly all calls took (at least a second, at most `timeout_s`): the call is
stopped and its samples are repeated one by one. A wrong guess costs that time again and nothing else; wrong guesses
raise the measure, so they stay rare. A hanging sample is thus marked about a second after `timeout_s`.
"""

import math
from collections import deque

RECENT = 50
NEARLY_ALL = 0.9
FADE = 0.8  # weight of a call, for the time that a sample takes, against the one after it
LEAST_PATIENCE_S = 1.0


class Pace:
    """The recent calls of one grader.

    Args:
        timeout_s: seconds that one sample may take.
        max_batch: most samples of a call.
    """

    def __init__(self, timeout_s: float, max_batch: int):
        self.timeout_s, self.max_batch = timeout_s, max_batch
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.first_seconds = 0.0
        self.total_seconds = self.total_samples = 0.0  # faded

    def record(self, status: str, samples: int, seconds: float, first: bool) -> None:
        """Learns from a call. `first` of this grader in its process: it may have loaded what later calls reuse."""
        if status == "ok":
            self.total_seconds = FADE * self.total_seconds + seconds
            self.total_samples = FADE * self.total_samples + samples
        if status == "ok" and first:
            self.first_seconds = max(self.first_seconds, seconds)
        elif status == "ok" or (status == "timeout" and samples > 1):
            self.seconds.append(seconds)

    def largest(self) -> int:
        """Most samples of a call, so that it takes at most half of `timeout_s` as far as is known."""
        if not self.total_seconds:
            return self.max_batch
        return max(1, min(self.max_batch, int(self.timeout_s / 2 * self.total_samples / self.total_seconds)))

    def limit_s(self, samples: int, first: bool) -> float:
        """Seconds that the next call of so many samples may take."""
        if samples == 1 or not self.seconds or (first and not self.first_seconds):
            return self.timeout_s
        nearly_all = sorted(self.seconds)[math.ceil(NEARLY_ALL * len(self.seconds)) - 1]
        return min(self.timeout_s, max(LEAST_PATIENCE_S, 2 * nearly_all, 2 * self.first_seconds if first else 0.0))
