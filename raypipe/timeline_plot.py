"""The timeline as a picture: who was busy when, so that grading is seen under generation.

In: spans of `spans.collect` and their `Summary`. Out: a PNG. One band a lane (engine, grader, rank), by stage in the
plan's order, on one time axis. A lane shows its spans as thin bars, packed so that none overlap; a stage that would
need more than MAX_ROWS rows of bars or MAX_LANES lanes shows how many items were in work instead. Red is failed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.intervals import in_work, pack
from raypipe.spans import DRIVER, LEARNER, Span, overlaps
from raypipe.timeline import Summary
from raypipe.timeline_trace import lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"Generate": "#4C78A8", "Grade": "#F2A03D", "Score": "#8E6BB8", LEARNER: "#4FA37A", DRIVER: "#9AA3AF"}
# Phases of the learner that look different from work on the samples.
PHASE_COLORS = {"update weights": "#23606E"}
RED, INK, FAINT, GRID = "#D1333F", "#24292F", "#6E7781", "#E4E7EB"
LENGTH = "#A9C4E0"  # cut at rollout.max_response_length
MEANINGS = {
    "Generate": "one bar a response; pale: cut by length",
    "Grade": "one bar a sample; red: failed",
    "Score": "one bar a sample",
    LEARNER: "dotted: waiting; dark: new weights to the engines",
    DRIVER: "the run's own process",
}
MAX_ROWS = 100  # rows of bars a stage
MAX_LANES = 16  # lanes a stage
INCHES_PER_ROW, COUNT_HEIGHT = 0.05, 1.4
WIDTH, TOP, BOTTOM, HEADER, GAP = 13.0, 1.05, 0.55, 0.36, 0.07  # inches
DPI = 150
LEFT, RIGHT = 0.1, 0.925  # of the width: the time axis


@dataclass(frozen=True)
class Band:
    """One row of the picture: a lane's bars, or how many items a stage or lane had in work."""

    stage: str
    label: str
    spans: Sequence[Span]
    rows: Sequence[int]  # row of each span, or empty: draw the count
    height: float  # inches
    busy: float | None  # fraction


def draw(path: Path, spans: Sequence[Span], summary: Summary, title: str) -> None:
    """Writes the picture of `spans` (at least one) to `path` (.png). `title` names the run and the iteration."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    bands = list(_bands(spans, summary))
    headed = [i == 0 or band.stage != bands[i - 1].stage for i, band in enumerate(bands)]
    above = [HEADER if head else GAP for head in headed]
    height = TOP + BOTTOM + sum(above) + sum(band.height for band in bands)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    zero, end = summary.window
    pad = 0.004 * (end - zero)
    y = height - TOP
    for band, head, space in zip(bands, headed, above, strict=True):
        y -= band.height + space
        axis = figure.add_axes((LEFT, y / height, RIGHT - LEFT, band.height / height))
        axis.set_xlim(-pad, end - zero + pad)
        _frame(axis, band)
        if head:
            _head(axis, band)
        if band.rows:
            _draw_bars(axis, band, zero)
        else:
            _draw_counts(axis, band, zero)
    for axis in figure.axes:
        last = axis is figure.axes[-1]
        axis.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        axis.tick_params(axis="x", length=0, pad=6, labelbottom=last, colors=FAINT, labelsize=9)
    figure.axes[-1].set_xlabel("seconds", color=FAINT, fontsize=9)
    _mark_overlaps(figure, bands, spans, zero)
    _write_titles(figure, spans, summary, title)
    figure.savefig(path)


def _bands(spans: Sequence[Span], summary: Summary) -> Iterator[Band]:
    by_stage: dict[str, dict[str, list[Span]]] = {}
    for (stage, lane), items in lanes(spans).items():
        by_stage.setdefault(stage, {})[lane] = items
    for stage, by_lane in by_stage.items():
        busy = dict(summary.busy.get(stage, {}))
        if len(by_lane) > MAX_LANES:
            mean = sum(busy.values()) / len(busy) if busy else None
            everything = [span for items in by_lane.values() for span in items]
            yield Band(stage, f"all {len(by_lane)}", everything, [], COUNT_HEIGHT, mean)
            continue
        rows = {lane: pack([(span.start, span.end) for span in items]) for lane, items in by_lane.items()}
        depths = [max(packed) + 1 for packed in rows.values()]
        as_bars = sum(depths) <= MAX_ROWS
        for (lane, items), depth in zip(by_lane.items(), depths, strict=True):
            height = max(0.3, depth * INCHES_PER_ROW) if as_bars else max(0.4, COUNT_HEIGHT / len(by_lane) ** 0.5)
            yield Band(stage, lane, items, rows[lane] if as_bars else [], height, busy.get(lane))


def _frame(axis: "Axes", band: Band) -> None:
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_facecolor("#F6F8FA")
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_yticks([])
    label: dict[str, Any] = {"va": "center", "fontsize": 9, "transform": axis.transAxes, "parse_math": False}
    axis.text(-0.01, 0.5, band.label[:16], ha="right", color=INK, **label)
    if band.busy is not None:
        axis.text(1.008, 0.5, f"{band.busy:.0%} busy", ha="left", color=COLORS[band.stage], weight="bold", **label)


def _head(axis: "Axes", band: Band) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    name = axis.annotate(band.stage, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=11, weight="bold",
                         color=COLORS[band.stage], bbox=box)  # fmt: skip
    words = MEANINGS[band.stage] if band.rows else "how many are in work; red: of these, failed"
    axis.annotate(words, (1, 0), (6, 3.6), name, "offset points", fontsize=9, color=FAINT, bbox=box)


def _draw_bars(axis: "Axes", band: Band, zero: float) -> None:
    from matplotlib.collections import PolyCollection

    axis.set_ylim(max(band.rows) + 1, 0)
    low, high = axis.get_xlim()
    pixel = (high - low) / ((RIGHT - LEFT) * WIDTH * DPI)
    groups: dict[tuple[tuple[str, Any], ...], list[Any]] = {}
    for span, row in zip(band.spans, band.rows, strict=True):
        wide = span.end - span.start > 4 * pixel
        left, right = span.start - zero, max(span.end, span.start + 1.5 * pixel) - zero  # 1 ms must still be seen
        top, bottom = row + 0.08, row + 0.92
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        groups.setdefault(tuple(_style(span, wide).items()), []).append(corners)
        if band.stage in (LEARNER, DRIVER):
            _name(axis, span, zero, row)
    for style, bars in groups.items():
        axis.add_collection(PolyCollection(bars, **dict(style)), autolim=False)


def _style(span: Span, wide: bool) -> dict[str, Any]:
    """A bar's look; one that is wide enough has a thin white edge, so that neighbours stay apart."""
    if span.failed:
        return {"facecolor": "#FBE3E5", "edgecolor": RED, "hatch": "/////", "linewidth": 0.8, "zorder": 2}
    if not span.busy:
        return {"facecolor": "#ECEFF2", "edgecolor": "#C4CBD3", "hatch": "....", "linewidth": 0.0}
    color = LENGTH if span.status == "length" else PHASE_COLORS.get(span.name, COLORS[span.stage])
    return {"facecolor": color, "edgecolor": "white" if wide else color, "linewidth": 0.4}


def _name(axis: "Axes", span: Span, zero: float, row: int) -> None:
    """Writes a phase's name into its bar, where it fits."""
    low, high = axis.get_xlim()
    shown = (span.end - span.start) / (high - low) * (RIGHT - LEFT) * WIDTH  # inches
    if shown > 0.085 * len(span.name) + 0.1:
        axis.text((span.start + span.end) / 2 - zero, row + 0.5, span.name, ha="center", va="center", fontsize=8.5,
                  color="white" if span.busy else FAINT, parse_math=False)  # fmt: skip


def _draw_counts(axis: "Axes", band: Band, zero: float) -> None:
    """Items in work over time, those that end by failure in red at the bottom."""
    layers = (
        ([span for span in band.spans if span.busy], COLORS[band.stage]),
        ([span for span in band.spans if span.failed], RED),
    )
    for spans, color in layers:
        steps = in_work((span.start - zero, span.end - zero) for span in spans)
        if steps:
            axis.fill_between([t for t, _ in steps], [n for _, n in steps], step="post", color=color, linewidth=0)
    peak = max(n for _, n in in_work((span.start, span.end) for span in band.spans))
    axis.set_ylim(0, peak * 1.05)
    axis.set_yticks([0, peak], ["0", f"{peak}"], fontsize=8, color=FAINT)
    axis.tick_params(axis="y", length=0, pad=3)


def _mark_overlaps(figure: "Figure", bands: Sequence[Band], spans: Sequence[Span], zero: float) -> None:
    """For each iteration, from its first grade's start to its last generation's end, across the bands of both."""
    from matplotlib.lines import Line2D

    marks = overlaps(spans)
    drawn = [axis for axis, band in zip(figure.axes, bands, strict=True) if band.stage in ("Generate", "Grade")]
    low, high = figure.axes[0].get_xlim()
    inch = 1 / figure.get_figheight()
    for iteration, (first, last) in marks.items():
        if first >= last:
            continue
        left, right = (LEFT + (t - zero - low) / (high - low) * (RIGHT - LEFT) for t in (first, last))
        top, bottom = 1 - TOP * inch, drawn[-1].get_position().y0
        thin: dict[str, Any] = {"color": INK, "linewidth": 0.8, "alpha": 0.55}
        for x, time in ((left, first), (right, last)):
            figure.add_artist(Line2D([x, x], [bottom, top], zorder=-1, **thin))  # behind bands and words
            for axis in drawn:
                axis.axvline(time - zero, zorder=5, **thin)
        figure.add_artist(Line2D([left, right], [top, top], color=INK, linewidth=1.8, solid_capstyle="butt"))
        text = f"iteration {iteration}: " if len(marks) > 1 else ""
        text += f"{last - first:.1f} s" + (" of grading under generation" if len(marks) < 3 else "")
        center = min(max((left + right) / 2, 0.14), 0.86)
        figure.text(center, top + 0.05 * inch, text, ha="center", fontsize=9, color=INK)


def _write_titles(figure: "Figure", spans: Sequence[Span], summary: Summary, title: str) -> None:
    height = figure.get_figheight()
    graded = {span.name for span in spans if span.stage == "Grade"}
    failed = {span.name for span in spans if span.failed}
    facts = [f"{summary.wall_s:.1f} s", f"efficiency {summary.efficiency:.0%}", f"{len(graded)} samples graded"]
    facts += [f"{len(failed)} failed"] if failed else []
    left = LEFT - 0.085
    figure.text(left, 1 - 0.38 / height, title, fontsize=15, weight="bold", color=INK, parse_math=False)
    figure.text(RIGHT, 1 - 0.38 / height, "  ·  ".join(facts), ha="right", fontsize=10.5, color=INK)
    advice = summary.advice[:1].upper() + summary.advice[1:]
    figure.text(left, 1 - 0.66 / height, advice, fontsize=10, color=FAINT, parse_math=False)
