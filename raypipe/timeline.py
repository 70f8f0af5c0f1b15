"""Busy, idle, efficiency, and the stage that bounds, from an iteration's spans.

In: rows and noted spans, as `spans.collect` takes them. Out: a `Summary`: numbers, and one sentence on what bounds and
what to do about it. The picture is in timeline_plot.py, the trace for ui.perfetto.dev in timeline_trace.py.

Words:
    busy      at least one item in work. A learner's span whose name begins with `wait` is not busy.
    idle      of a stage: 1 - the mean over its lanes of busy time / wall time. A lane that did nothing at all leaves no
              row and is not counted.
    efficiency  the busiest lane's busy time / wall time.
Times of different nodes are as comparable as the nodes' clocks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.intervals import Interval, in_work, intersect, seconds, subtract, union
from raypipe.spans import DRIVER, LEARNER, RESOURCES, Span, calls, collect, natural, overlaps

# A finished sample that waited for longer than this, while every grader was at work, waited for a grader.
QUEUED_S = 0.1


@dataclass(frozen=True)
class Summary:
    """What an iteration's spans say (see the words above).

    window: (start, end) that the fractions refer to.
    busy: stage -> lane -> busy fraction of the window.
    idle: stage -> idle fraction.
    phases: name of a driver's or learner's span, or stage in lower case -> seconds in the window.
    first_grade_lead_s: from an iteration's first grade start to its last generate end, the shortest of the iterations;
        below 0 where grading did not overlap with generation; None where nothing was graded.
    overlap: the part of grading's busy time that lay under generation; None where nothing was graded.
    bounding: the stage that held the others up for longest, or "" where no resource was busy for longest.
    advice: one sentence: what bounds and what to do about it.
    """

    window: Interval
    busy: Mapping[str, Mapping[str, float]]
    idle: Mapping[str, float]
    efficiency: float
    phases: Mapping[str, float]
    first_grade_lead_s: float | None
    overlap: float | None
    bounding: str
    advice: str

    @property
    def wall_s(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def first_grade_start_before_last_generate_end(self) -> bool | None:
        return None if self.first_grade_lead_s is None else self.first_grade_lead_s > 0


def summarize(
    rows: Iterable[Mapping[str, Any]], spans: Iterable[Mapping[str, Any]] = (), window: Interval | None = None
) -> Summary:
    """The numbers of `rows` and `spans` (as `collect` takes them) over `window`.

    Args:
        window: (start, end); default: from the first span's start to the last one's end. What lies outside is cut. With
            `pipeline.max_staleness` over 0, engines work on several iterations within one's window: pass the rows of
            all of them.

    Raises:
        ValueError: there is no span, or the window is empty.
    """
    found = collect(rows, spans)
    if window is None and found:
        window = (found[0].start, max(span.end for span in found))
    if window is None or window[0] >= window[1]:
        raise ValueError(f"a timeline needs a span and a window longer than 0 s; got {len(found)} spans over {window}")
    wall = window[1] - window[0]
    lanes: dict[str, dict[str, list[Interval]]] = {}
    for span in found:
        if span.busy and span.stage in RESOURCES:
            lanes.setdefault(span.stage, {}).setdefault(span.lane, []).append((span.start, span.end))
    busy = {
        stage: {lane: seconds(_clip(lanes[stage][lane], window)) / wall for lane in sorted(lanes[stage], key=natural)}
        for stage in RESOURCES
        if stage in lanes
    }
    working = {stage: _clip([i for lane in lanes[stage].values() for i in lane], window) for stage in busy}
    grading = working.get("Grade", [])
    hidden = seconds(intersect(grading, working.get("Generate", [])))
    bounding = _bounding(found, working, window)
    return Summary(
        window=window,
        busy=busy,
        idle={stage: 1 - sum(fractions.values()) / len(fractions) for stage, fractions in busy.items()},
        efficiency=max((fraction for fractions in busy.values() for fraction in fractions.values()), default=0.0),
        phases=_phases(found, working, window),
        first_grade_lead_s=min((last - first for first, last in overlaps(found).values()), default=None),
        overlap=hidden / seconds(grading) if grading else None,
        bounding=bounding,
        advice=_advice(bounding, found, working, window),
    )


def _clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    return intersect(union(intervals), [window])


def _phases(found: Sequence[Span], working: Mapping[str, Sequence[Interval]], window: Interval) -> dict[str, float]:
    """Seconds in the window that each phase took on any lane: two ranks that train side by side count once."""
    named: dict[str, list[Interval]] = {}
    for span in found:
        if span.stage in (LEARNER, DRIVER):
            named.setdefault(span.name, []).append((span.start, span.end))
    stages = {stage.lower(): seconds(times) for stage, times in working.items() if stage != LEARNER}
    return {**stages, **{name: seconds(_clip(times, window)) for name, times in named.items()}}


# What bounds


def _bounding(found: Sequence[Span], working: Mapping[str, list[Interval]], window: Interval) -> str:
    """The stage that held the others up for longest.

    Engines and learner: while they were busy. Graders and scorers can be busy all the time at a light load, since one
    item makes them busy; they hold others up while something waits for them though all are at work, and while nothing
    before them is at work. "" stands for the time when no resource was busy.
    """
    held = {"": seconds(subtract([window], union(interval for times in working.values() for interval in times)))}
    before: list[Interval] = []
    for stage, times in working.items():
        if stage in ("Grade", "Score"):
            held[stage] = seconds(union([*_saturated(found, stage, window), *subtract(times, before)]))
        else:
            held[stage] = seconds(times)
        before = union([*before, *times])
    return max(held, key=lambda stage: held[stage])


def _saturated(found: Sequence[Span], stage: str, window: Interval) -> list[Interval]:
    """The times when samples waited for `stage` and it had about its width in work."""
    full = _at_least(calls(found, stage), math.ceil(0.75 * _width(found, stage)))
    return intersect(intersect(_waiting(found, stage), full), [window])


def _waiting(found: Sequence[Span], stage: str) -> list[Interval]:
    """The times when a sample had left the stage before and was not yet in work at `stage`."""
    left: dict[str, float] = {}
    waits = []
    for span in found:  # by start, so `left` holds the end of the latest stage before this one
        if span.stage != stage:
            left[span.name] = span.end
        elif span.name in left and span.start - (since := left.pop(span.name)) > QUEUED_S:
            waits.append((since, span.start))
    return union(waits)


def _at_least(intervals: Sequence[Interval], count: int) -> list[Interval]:
    """The times that at least `count` of the intervals cover."""
    steps = in_work(intervals)
    return union((steps[i][0], steps[i + 1][0]) for i in range(len(steps) - 1) if steps[i][1] >= count)


def _width(found: Sequence[Span], stage: str) -> int:
    """How many calls the stage had in work at the same time: the most, but for moments (under 5% of its busy time)."""
    times = calls(found, stage)
    enough = 0.05 * seconds(union(times))
    counts = sorted({count for _, count in in_work(times)}, reverse=True)
    return next(count for count in counts if seconds(_at_least(times, count)) >= enough)


def _advice(bounding: str, found: Sequence[Span], working: Mapping[str, list[Interval]], window: Interval) -> str:
    wall = window[1] - window[0]
    if not bounding:
        idle = wall - seconds(union(interval for times in working.values() for interval in times))
        return f"nothing bounds: no resource was busy for {idle:.1f} of {wall:.1f} s (start-up, switching, waiting)"
    share = f"({seconds(working[bounding]) / wall:.0%} busy)"
    if bounding == "Generate":
        return f"generation bounds {share}: {_generate_advice(found)}"
    if bounding == LEARNER:
        return (
            f"the learner bounds {share}: add train.ranks or raise train.micro_batch_tokens; "
            "pipeline.max_staleness=1 lets generation go on meanwhile"
        )
    return f"{'grading' if bounding == 'Grade' else 'scoring'} bounds {share}: {_pool_advice(bounding, found, working)}"


def _generate_advice(found: Sequence[Span]) -> str:
    """Few long responses at the end of generation need another remedy than too few engines."""
    steps = in_work((span.start, span.end) for span in found if span.stage == "Generate")
    peak = max(count for _, count in steps)
    tail = 0.0
    for i in reversed(range(len(steps))):
        if steps[i][1] > peak / 8:
            tail = steps[-1][0] - steps[i + 1][0]
            break
    if peak >= 8 and tail > 0.25 * (steps[-1][0] - steps[0][0]):
        return (
            f"{tail:.1f} s of it for the last few of {peak} requests: lower rollout.max_response_length, or fill the "
            "tail by pipeline.max_staleness=1"
        )
    return "add engines (engine.count) or raise engine.max_num_seqs"


def _pool_advice(stage: str, found: Sequence[Span], working: Mapping[str, list[Interval]]) -> str:
    """More workers where samples wait for one; where none does, it is single samples that take long."""
    generating = working.get("Generate", [])
    alone = subtract(working[stage], generating)
    if seconds(intersect(_waiting(found, stage), alone)) < 0.5 * seconds(alone):
        slowest = max((span for span in found if span.stage == stage), key=lambda span: span.end - span.start)
        return (
            f"by one sample: {slowest.name} took {slowest.end - slowest.start:.1f} s "
            f"({slowest.status}): make it faster or lower its timeout_s"
        )
    width = _width(found, stage)
    needed = math.ceil(seconds(calls(found, stage)) / seconds(generating)) if generating else 2 * width
    return _raise(stage, found, width, max(needed, width + 1))


def _raise(stage: str, found: Sequence[Span], width: int, needed: int) -> str:
    """Which setting makes `needed` calls run at the same time instead of `width`. Lanes of graders are called
    <host>/<process>, and <host>/loop for async ones."""
    if stage != "Grade":
        return f"raise scorer.count from {width} to about {needed}"
    lanes = {span.lane for span in found if span.stage == "Grade"}
    waited = seconds((span.start, span.end) for span in found if span.stage == "Grade" and span.lane.endswith("/loop"))
    if waited > 0.5 * seconds((span.start, span.end) for span in found if span.stage == "Grade"):
        return (
            f"raise grade.async_concurrency (and grade.async_rate, if it is set) from {width} to about {needed} calls"
        )
    hosts = Counter(lane.partition("/")[0] for lane in lanes if not lane.endswith("/loop"))
    processes = max(hosts.values())
    workers = max(len(hosts) + 1, math.ceil(needed / processes))
    each = f" ({processes} grade.processes each)" if processes > 1 else ""
    return f"raise grade.workers from {len(hosts)} to about {workers}{each}"
