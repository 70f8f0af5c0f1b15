"""The console: plain lines without a terminal, a table and bars on one, and nothing that can break a run."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.console import Cell, Console, duration, fit, short, sparkline

METRICS = {
    "iteration": 3,
    "reward/mean": 0.6125,
    "reward/heldout_mean": 0.58,
    "response/length_mean": 213.4,
    "policy/kl": 1.234e-4,
    "grad_norm": 0.834,
    "lag/graded_p95_s": 0.081,
    "idle/generate": 0.09,
    "idle/grade": 0.71,
    "idle/learner": 0.62,
    "tokens_per_s": 5123.0,
    "time/iteration_s": 12.3,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(total=10, quiet=False):
    stream, clock = io.StringIO(), Clock()
    return Console(total, quiet, stream, clock), stream, clock


def terminal(monkeypatch, width=120, total=10, quiet=False):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    stream, clock = Terminal(), Clock()
    return Console(total, quiet, stream, clock), stream, clock


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_plain_line_names_its_values():
    console, stream, _ = plain()
    console.start_iteration(3, 64)
    console.end_iteration(METRICS)
    assert stream.getvalue() == (
        "iter 3/10  reward 0.613  held-out 0.580  length 213  kl 1.2e-04  grad 0.83  lag p95 0.08s  idle gen 9%  "
        "idle grade 71%  idle learn 62%  tokens/s 5.1k  time 12.3s  left 1m13s\n"
    )


def test_a_metric_without_a_value_is_not_shown():
    console, stream, _ = plain()
    console.end_iteration({"iteration": 0, "reward/mean": 0.5})
    assert stream.getvalue() == "iter 0/10  reward 0.500\n"


def test_without_a_terminal_there_are_no_control_codes_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    console, stream, clock = plain()
    console.start_iteration(3, 64)
    clock.now = 100
    console.progress("generated", 10)
    console.end_iteration(METRICS)
    console.warn("w")
    console.summary(["a line that is longer than twenty characters"])
    console.close()
    assert stream.getvalue().replace("\n", "").isprintable()
    assert [line[:9] for line in stream.getvalue().splitlines()] == ["iteration", "iter 3/10", "warning: ", "a line th"]


def test_plain_progress_comes_now_and_then_only():
    console, stream, clock = plain()
    console.start_iteration(3, 64)
    for second in range(1, 100):
        clock.now = second
        console.progress("generated", second // 2)
    assert stream.getvalue().splitlines() == [
        "iteration 3: generated 15/64 (0.5/s), graded 0/64 (0.0/s), trained 0/64 (0.0/s) after 30.0s",
        "iteration 3: generated 30/64 (0.5/s), graded 0/64 (0.0/s), trained 0/64 (0.0/s) after 1m00s",
        "iteration 3: generated 45/64 (0.5/s), graded 0/64 (0.0/s), trained 0/64 (0.0/s) after 1m30s",
    ]


def test_quiet_shows_lines_but_no_progress(monkeypatch):
    for console, stream, clock in (plain(quiet=True), terminal(monkeypatch, quiet=True)):
        console.start_iteration(3, 64)
        clock.now = 1000
        console.progress("generated", 5)
        assert stream.getvalue() == ""
        console.end_iteration(METRICS)
        assert "0.613" in stream.getvalue()
        console.close()


def test_on_a_terminal_bars_come_and_go_and_the_cursor_returns(monkeypatch):
    console, stream, clock = terminal(monkeypatch)
    console.end_iteration(METRICS)
    console.start_iteration(4, 64)
    clock.now = 10
    console.progress("generated", 40)
    clock.now = 20
    console.progress("graded", 30)
    shown = without_codes(stream.getvalue())
    assert re.search(r"iteration 4/10  20\.0s  reward . 0\.613  1m01s left", shown)
    assert re.search(r"generated .+ 40/64 +2\.0/s", shown) and re.search(r"graded .+ 30/64 +1\.5/s +queue 10", shown)
    assert "\x1b[?25l" in stream.getvalue()
    console.close()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    assert stream.getvalue().endswith("\x1b[2K")  # the bars are gone


def test_bars_are_drawn_at_most_ten_times_a_second(monkeypatch):
    console, stream, clock = terminal(monkeypatch)
    console.start_iteration(0, 1000)
    for count in range(1000):
        clock.now += 0.001
        console.progress("generated", count)
    console.close()
    assert stream.getvalue().count("generated") <= 13


@pytest.mark.parametrize("width", [1, 2, 5, 20, 40, 60, 80, 100, 120, 200])
def test_a_table_line_fits_any_terminal(monkeypatch, width):
    console, stream, clock = terminal(monkeypatch, width)
    console.start_iteration(3, 64)
    clock.now = 5
    console.progress("generated", 5)
    console.close()
    bars = stream.getvalue()
    console.end_iteration(METRICS)
    header, line = without_codes(stream.getvalue()[len(bars) :]).splitlines()
    assert len(header) == len(line) <= max(width, 5)
    assert line.split()[0] == "3/10"
    assert header.split()[0] == "iter"
    if width >= 20:
        assert "0.613" in line
    if width >= 120:
        assert line.split()[1:] == [
            "0.613", "0.580", "213", "1.2e-04", "0.83", "0.08s", "9%", "71%", "62%", "5.1k", "12.3s", "1m13s",
        ]  # fmt: skip


def test_columns_stay_in_place_where_a_value_is_missing(monkeypatch):
    console, stream, _ = terminal(monkeypatch)
    console.end_iteration(METRICS)
    console.end_iteration({name: of for name, of in METRICS.items() if name != "reward/heldout_mean"})
    _, first, second = without_codes(stream.getvalue()).splitlines()
    assert first.index("213") == second.index("213") and "0.580" not in second


def test_text_from_a_model_cannot_steer_the_terminal(monkeypatch):
    hostile = "\x1b[2J\x1b]0;owned\x07 [red]x[/red] :smile: a\nb\u202e"
    for console, stream, _ in (plain(), terminal(monkeypatch)):
        console.note(hostile)
        console.warn(hostile)
        console.summary([hostile])
        lines = without_codes(stream.getvalue()).splitlines()
        assert len(lines) == 3
        for line in lines:
            assert line.endswith(r"\x1b[2J\x1b]0;owned\x07 [red]x[/red] :smile: a\nb\u202e")
        assert "\x1b[2J" not in stream.getvalue() and "\x1b]" not in stream.getvalue()


class Closed(io.StringIO):
    """Fails in every way that a stream has."""

    def __init__(self, error, tty):
        super().__init__()
        self.error, self.tty = error, tty

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error

    def isatty(self):
        return self.tty


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "no space"), ValueError("I/O on closed file")])
def test_no_stream_can_break_a_run(error, tty):
    console = Console(10, False, Closed(error, tty))
    for i in range(3):
        console.start_iteration(i, 8)
        console.progress("generated", 8)
        console.end_iteration(METRICS)
    console.warn("w")
    console.summary(["s"])
    console.close()
    assert len(console.rewards) == 3


def test_a_stream_of_ascii_gets_ascii():
    raw = io.BytesIO()
    console = Console(10, False, io.TextIOWrapper(raw, encoding="ascii"))
    for reward in (0.1, 0.5, 0.9):
        console.end_iteration({"iteration": 0, "reward/mean": reward})
    console.note("数")
    console.summary([])
    assert raw.getvalue().decode("ascii").splitlines()[3:] == [r"\u6570", "reward 0.100 _+# 0.900"]


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    """As in `python -m raypipe.train ... | head -1`: the run goes on and ends with status 0, also where
    others print. (It writes more than a pipe holds, so it writes after the reader has left.)"""
    done = tmp_path / "done"
    script = (
        "import sys, pathlib; from raypipe.console import Console; c = Console(9)\n"
        "for i in range(9000): c.end_iteration({'iteration': i, 'reward/mean': 0.5})\n"
        f"print('other', flush=True); c.summary(['end']); c.close(); pathlib.Path({str(done)!r}).touch()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(timeout=60), error) == (0, b"")
    assert done.exists()


def test_a_killed_run_gives_the_cursor_back(tmp_path):
    """An exception that ends the driver inside an iteration must not leave the terminal without a cursor."""
    script = (
        "from raypipe.console import Console; import io, os, sys\n"
        "class Terminal(io.TextIOWrapper):\n    def isatty(self): return True\n"
        "c = Console(10, stream=Terminal(os.fdopen(1, 'wb', closefd=False)))\n"
        "c.start_iteration(0, 8)\nraise SystemExit(3)\n"
    )
    environment = {**os.environ, "TERM": "xterm"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=Path(__file__).parent.parent, env=environment
    )
    assert result.returncode == 3
    assert result.stdout.rindex(b"\x1b[?25h") > result.stdout.rindex(b"\x1b[?25l")


def test_sparkline_is_from_lowest_to_highest_and_averages_what_does_not_fit():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7, 0, 0], 3) == "▁█▁"
    assert sparkline([5, 5, 5], 10) == "▁▁▁"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 40)) == 40


@pytest.mark.parametrize(
    "seconds, text",
    [(0.423, "0.42s"), (12.34, "12.3s"), (245, "4m05s"), (3599.9, "59m59s"), (12000, "3h20m"), (187200, "2d04h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_short_numbers():
    assert [short(n) for n in (0, 812.4, 5123, 1.24e6)] == ["0", "812", "5.1k", "1.2M"]


def test_fit_drops_the_highest_rank_first_and_keeps_the_order():
    cells = [Cell("a", "1", 4, 0), Cell("b", "2", 4, 2), Cell("c", "3", 4, 1)]
    assert [cell.label for cell in fit(cells, 15)] == ["a", "b", "c"]
    assert [cell.label for cell in fit(cells, 14)] == ["a", "c"]
    assert [cell.label for cell in fit(cells, 1)] == ["a"]
