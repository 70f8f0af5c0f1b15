"""What a person watching the run sees: one line an iteration, and live bars while a long one goes on.

In: the driver's calls. Out: text. On a terminal the lines form a table that fits its width, and bars under it show how
many samples are generated, graded and trained on. Elsewhere (a file, a pipe) every line is plain text that names its
values, with a line of progress now and then. Decision: watching never breaks a run. All output goes through
`_SafeStream`, which swallows a closed pipe, a full disk and characters that the stream cannot encode; there is no
thread of its own; and text from outside is escaped, so no model can steer the terminal.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO, cast

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypipe.samples import terminal_safe

STAGES = ("generated", "graded", "trained")
SHORT_STAGES = {"generate": "gen", "learner": "learn"}
REFRESH_S = 0.1  # of live bars
PLAIN_PROGRESS_S = 30.0  # between progress lines where there is no terminal
HEADER_EVERY = 25  # lines
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.-=+*%#"


class Console:
    """Args:
    total_iterations: iterations of the run, for the count and the time left.
    quiet: no progress inside an iteration.
    stream: where to write; default: standard output.
    clock: seconds from any start.
    stages: whose progress is shown from the start.
    """

    def __init__(
        self,
        total_iterations: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        stages: Sequence[str] = STAGES,
    ):
        self.total_iterations = total_iterations
        self.quiet = quiet
        self.clock = clock
        self.stages = stages
        self.stream = _SafeStream(stream or sys.stdout)
        self.terminal = self.stream.isatty() and os.environ.get("TERM", "") != "dumb"
        self.screen = rich.console.Console(
            file=cast(IO[str], self.stream), force_terminal=self.terminal, highlight=False, markup=False, emoji=False
        )
        self.rewards: list[float] = []
        self.durations: list[float] = []
        self.lines = 0
        self.done: dict[str, int] = {}
        self.live: Live | None = None
        self.iteration = self.samples = 0
        self.started = self.shown = clock()
        atexit.register(self.close)

    def start_iteration(self, iteration: int, samples: int) -> None:
        """Iteration `iteration` begins; each stage will see `samples` samples."""
        self._stop_live()
        self.iteration, self.samples = iteration, samples
        self.done = dict.fromkeys(self.stages, 0)
        self.started = self.shown = self.clock()
        if self.terminal and not self.quiet:
            self.live = Live(
                self._bars(), console=self.screen, auto_refresh=False, transient=True, vertical_overflow="crop"
            )
            self.live.start()

    def progress(self, stage: str, done: int) -> None:
        """`done` samples of the iteration have passed `stage` (generated, graded, trained or another)."""
        self.done[stage] = done
        now = self.clock()
        if self.quiet or now - self.shown < (REFRESH_S if self.live else PLAIN_PROGRESS_S):
            return
        self.shown = now
        if self.live:
            self.live.update(self._bars(), refresh=True)
        else:
            parts = [f"{name} {count}/{self.samples} ({self._rate(count)})" for name, count in self.done.items()]
            self.note(f"iteration {self.iteration}: {', '.join(parts)} after {duration(now - self.started)}")

    def end_iteration(self, metrics: Mapping[str, float]) -> None:
        """Writes the iteration's line from its metrics (names of metrics.py; what is missing is left out)."""
        self._stop_live()
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "time/iteration_s" in metrics:
            self.durations.append(metrics["time/iteration_s"])
        cells = self._cells(metrics)
        if not self.terminal:
            self._print("  ".join(cell.plain for cell in cells if cell.value))
            return
        cells = fit(cells, self.screen.width)
        if self.lines % HEADER_EVERY == 0:
            self._print(" ".join(cell.label.rjust(cell.width) for cell in cells), style="dim")
        self.lines += 1
        self._print(Text(" ").join(Text(cell.value.rjust(cell.width), style=cell.style) for cell in cells))

    def note(self, text: str) -> None:
        self._print(terminal_safe(text))

    def warn(self, text: str) -> None:
        self._print("warning: " + terminal_safe(text), style="bold yellow")

    def summary(self, lines: Sequence[str]) -> None:
        """The end of the run: the curve of rewards, and `lines` as they are but for unsafe characters."""
        self._stop_live()
        if len(self.rewards) > 1:
            self._print(f"reward {self.rewards[0]:.3f} {self.sparkline(40)} {self.rewards[-1]:.3f}", style="bold")
        for line in lines:
            self._print(terminal_safe(line))

    def close(self) -> None:
        """Takes the bars away and gives the cursor back. May be called twice."""
        self._stop_live()
        atexit.unregister(self.close)

    def sparkline(self, width: int) -> str:
        """The rewards so far in `width` characters or fewer, each the mean of as many iterations as needed."""
        return sparkline(self.rewards, width, SPARKS if self.stream.encodes(SPARKS) else ASCII_SPARKS)

    def _stop_live(self) -> None:
        if self.live:
            live, self.live = self.live, None
            live.stop()

    def _print(self, text: Text | str, style: str = "") -> None:
        if self.terminal:
            self.screen.print(text, style=style, soft_wrap=True)
        else:
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def _bars(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        width = max(4, min(40, self.screen.width - 45))
        before = None
        for name, count in self.done.items():
            words = [(name, "cyan"), (f"{count}/{self.samples}", ""), (self._rate(count), "dim")]
            words.append((f"queue {max(0, before - count)}" if before is not None else "", "dim"))
            before = count
            cells = [Text(word, style=style, no_wrap=True) for word, style in words]
            grid.add_row(cells[0], ProgressBar(max(self.samples, 1), count, width), *cells[1:])
        head = f"iteration {self.iteration}/{self.total_iterations}  {duration(self.clock() - self.started)}"
        if self.rewards:
            head += f"  reward {self.sparkline(20)} {self.rewards[-1]:.3f}"
        if self.durations:
            head += f"  {self._left()} left"
        table = Table.grid()
        table.add_row(Text(head, no_wrap=True, overflow="ellipsis"))
        table.add_row(grid)
        return table

    def _rate(self, count: int) -> str:
        return f"{count / max(self.clock() - self.started, 1e-3):.1f}/s"

    def _left(self) -> str:
        recent = self.durations[-10:]
        return duration(sum(recent) / len(recent) * max(0, self.total_iterations - self.iteration - 1))

    def _cells(self, metrics: Mapping[str, float]) -> list["Cell"]:
        def value(name: str, form: str, unit: str = "") -> str:
            return f"{metrics[name]:{form}}{unit}" if name in metrics else ""

        idle = {name.removeprefix("idle/"): of for name, of in metrics.items() if name.startswith("idle/")}
        iteration = f"{metrics.get('iteration', self.iteration):.0f}/{self.total_iterations}"
        took = metrics.get("time/iteration_s")
        tokens = metrics.get("tokens_per_s")
        return [
            Cell("iter", iteration, max(4, 2 * len(str(self.total_iterations)) + 1), 0),
            Cell("reward", value("reward/mean", ".3f"), 6, 1, "bold green"),
            Cell("held-out", value("reward/heldout_mean", ".3f"), 8, 4, "green"),
            Cell("length", value("response/length_mean", ".0f"), 6, 7),
            Cell("kl", value("policy/kl", ".1e"), 8, 8),
            Cell("grad", value("grad_norm", ".2f"), 6, 9),
            Cell("lag p95", value("lag/graded_p95_s", ".2f", "s"), 7, 5),
            *(_idle_cell(name, of) for name, of in idle.items()),
            Cell("tokens/s", "" if tokens is None else short(tokens), 8, 6),
            Cell("time", "" if took is None else duration(took), 6, 2),
            Cell("left", self._left() if self.durations else "", 6, 3),
        ]


@dataclass(frozen=True)
class Cell:
    """A value of an iteration's line. `rank`: 0 is shown first where there is little room."""

    label: str
    value: str
    width: int
    rank: int
    style: str = ""

    @property
    def plain(self) -> str:
        return f"{self.label} {self.value}"


def _idle_cell(stage: str, fraction: float) -> Cell:
    label = f"idle {SHORT_STAGES.get(stage, stage)}"
    return Cell(label, f"{fraction:.0%}", len(label), 3)


def fit(cells: Sequence[Cell], width: int) -> list[Cell]:
    """The cells of the lowest ranks that fit into `width` characters, in their order; at least the first."""
    kept = list(cells)
    while len(kept) > 1 and sum(cell.width + 1 for cell in kept) > width:
        kept.remove(max(reversed(kept), key=lambda cell: cell.rank))
    return kept


def sparkline(values: Sequence[float], width: int, sparks: str = SPARKS) -> str:
    """`values` in `width` characters or fewer, from the lowest to the highest of them."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    return "".join(sparks[round((mean - low) / (high - low or 1) * (len(sparks) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """0.42s, 12.3s, 4m05s, 3h20m, 2d04h"""
    if seconds < 1:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = round(seconds / 60)
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    return (
        f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 1440 else f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"
    )


def short(number: float) -> str:
    """812, 5.1k, 1.2M"""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


class _SafeStream:
    """A text stream that never raises. What cannot be encoded is escaped; what cannot be written is lost."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.encoding = stream.encoding or "utf-8"  # a StringIO has none

    def write(self, text: str) -> int:
        try:
            self.stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except BrokenPipeError:
            self._discard()
        except (OSError, ValueError):
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._discard()
        except (OSError, ValueError):
            pass

    def _discard(self) -> None:
        """Nobody reads any more. The stream leads to the null device from now on, so that no other print fails."""
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass

    def encodes(self, text: str) -> bool:
        return text.encode(self.encoding, "ignore").decode(self.encoding) == text

    def isatty(self) -> bool:
        try:
            return self.stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return self.stream.fileno()
