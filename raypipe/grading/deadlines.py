"""How many samples a call takes and how long it may last, learnt from the calls before it.

`timeout_s` is what one sample may take when it is called alone, and only that marks a sample. A call of several is a
bet that none of them hangs. Waiting `timeout_s` for each member before the bet is called off would hold its process for
minutes, so it is off after twice what a call of its size takes (at least `LEAST_PATIENCE_S`, at most `timeout_s`): the
call is stopped and its samples are repeated one by one. A wrong guess costs that time again and a new process, and the
next guess waits twice as long. Where a new process takes longer than the least patience, that is worth waiting for too.
A hanging sample is thus marked within 2 s after `timeout_s`.

A call costs a + b * n seconds for n samples. Where b matters, what waits is spread over all slots; where a matters, as
for a model, one slot takes all: a part is worth a call of its own only if it has more work of its own than that costs.
Nor does a call take more than makes a small part of it: its samples would only wait for one another.
"""

import math
from collections import deque

RECENT, LAST = 50, 3
NEARLY_ALL = 0.9
LEAST_PATIENCE_S, MOST_LEAST_PATIENCE_S = 0.5, 1.5
LONG_ENOUGH = 20  # a call whose samples cost so many times what it costs itself
FADE = 0.97  # weight of a call, in the cost of calls, against the one after it


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
        self.patience_s = LEAST_PATIENCE_S
        # Faded sums over calls of n samples and t seconds, for the least squares fit of t = a + b * n.
        self.calls = self.n = self.t = self.nn = self.nt = self.tt = 0.0

    def record(self, status: str, samples: int, seconds: float, first: bool) -> None:
        """Learns from a call. `first` of this grader in its process: it may have loaded what later calls reuse."""
        if status == "ok" and first:
            self.first_seconds = max(self.first_seconds, seconds)
        elif status == "ok":
            self.seconds.append(seconds)
            terms = (1.0, samples, seconds, samples * samples, samples * seconds, seconds * seconds)
            sums = (self.calls, self.n, self.t, self.nn, self.nt, self.tt)
            self.calls, self.n, self.t, self.nn, self.nt, self.tt = (
                FADE * total + term for total, term in zip(sums, terms, strict=True)
            )
        elif status == "timeout" and samples > 1:
            self.seconds.append(seconds)

    def replaced(self, seconds: float) -> None:
        """Learns how long a slot had no process after a call was stopped."""
        self.patience_s = min(max(LEAST_PATIENCE_S, seconds), MOST_LEAST_PATIENCE_S)

    @property
    def spread(self) -> float:
        """Of the sizes of calls; 0 where all were of one size, which says nothing of what a call itself costs."""
        spread = self.nn - self.n * self.n / self.calls if self.calls else 0.0
        return spread if spread > 1e-9 * self.nn else 0.0

    def cost(self) -> tuple[float, float]:
        """(a, b) of the seconds a + b * n of a call. Where nothing is known of a, it is 0."""
        if not self.calls:
            return 0.0, 0.0
        spread = self.spread
        if not spread:
            return 0.0, self.t / self.n
        b = min(max((self.nt - self.n * self.t / self.calls) / spread, 0.0), self.t / self.n)
        return max(0.0, self.t - b * self.n) / self.calls, b

    def sure_cost(self) -> float:
        """What a call costs itself at least: a less two standard errors. A busy machine makes a look larger."""
        a, b = self.cost()
        if not self.spread or self.calls <= 2.0:
            return 0.0
        squares = self.tt - 2 * (a * self.t + b * self.nt) + a * a * self.calls + b * (2 * a * self.n + b * self.nn)
        variance = max(0.0, squares) / (self.calls - 2.0) * self.nn / (self.calls * self.spread)
        return max(0.0, a - 2 * math.sqrt(variance))

    def share(self, waiting: int, slots: int) -> int:
        """How many of so many waiting samples a free slot takes: at most what lasts half of `timeout_s`.

        One, while no call has come back: how long to wait for several would be anybody's guess.
        """
        if not self.calls and not self.first_seconds:
            return 1
        a, b = self.cost()
        sure = self.sure_cost()
        parts = slots if sure == 0.0 else min(slots, max(1, int(b * waiting / sure)))
        most = self.max_batch if not self.n else min(self.max_batch, int(self.timeout_s / 2 * self.n / self.t))
        if self.spread and b:
            most = min(most, math.ceil(LONG_ENOUGH * a / b))
        return max(1, min(math.ceil(waiting / parts), most))

    def limit_s(self, samples: int, first: bool) -> float:
        """Seconds that the next call of so many samples may take."""
        if samples == 1 or (not self.seconds and not self.first_seconds):
            return self.timeout_s
        recent = sorted(self.seconds)
        nearly_all = recent[math.ceil(NEARLY_ALL * len(recent)) - 1] if recent else self.first_seconds
        slow = max(nearly_all, *list(self.seconds)[-LAST:], self.first_seconds if first else 0.0)
        a, b = self.cost()
        return min(self.timeout_s, max(self.patience_s, 2 * slow, 2 * (a + b * samples)))
