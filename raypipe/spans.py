"""Spans: what was in work where, from when to when.

In: rows that have passed the plan, and what driver and learner noted, as {lane, name, start, end}. Out: `Span`s.
Decision: every row carries its own timestamps (seconds since the epoch), so no stage logs events.

A lane is one resource: an engine, a grader's slot, a scorer, or the learner (`learner`, `learner-<rank>`). Spans of
other lanes are the driver's: drawn and timed, but no resource.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypipe.intervals import Interval

# Stage, and the row's columns with its lane, start and end.
STAGES = (
    ("Generate", "engine", "generate_start", "generate_end"),
    ("Grade", "grader", "grade_start", "grade_end"),
)
STATUS_COLUMN = {"Generate": "finish_reason", "Grade": "grade_status"}
LEARNER = "Learner"
DRIVER = "Driver"
RESOURCES = ("Generate", "Grade", "Score", LEARNER)
FAILED_STATUSES = ("failed", "error", "timeout", "crash")


@dataclass(frozen=True)
class Span:
    """One item in work on one lane, from `start` to `end`. `status` is the finish reason or the grade status."""

    stage: str
    lane: str
    name: str
    start: float
    end: float
    status: str = "ok"
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.status in FAILED_STATUSES

    @property
    def busy(self) -> bool:
        return not (self.stage == LEARNER and self.name.startswith("wait"))


def collect(rows: Iterable[Mapping[str, Any]], spans: Iterable[Mapping[str, Any]] = ()) -> list[Span]:
    """All spans of `rows` (columns of rows.py) and `spans` ({lane, name, start, end}), by start."""
    found = []
    for row in rows:
        told = {"sample_id": row["sample_id"], "iteration": row["iteration"], "tokens": len(row["response_ids"])}
        for stage, lane, start, end in STAGES:
            calls = _grader_calls(row, told) if stage == "Grade" else []
            if not calls and _is_time(row.get(start)) and _is_time(row.get(end)):
                status = row[STATUS_COLUMN[stage]] if stage in STATUS_COLUMN else "ok"
                calls = [_span(stage, row[lane], row["sample_id"], row[start], row[end], status, told)]
            found += calls
        found += _scorer_calls(row, told)
    for span in spans:
        lane = span["lane"]
        stage = LEARNER if lane == "learner" or lane.startswith("learner-") else DRIVER
        found.append(_span(stage, lane, span["name"], span["start"], span["end"], "ok", {}))
    return sorted(found, key=lambda span: span.start)


def _grader_calls(row: Mapping[str, Any], told: dict[str, Any]) -> list[Span]:
    """A span for each grader of the sample, where `grades` says when and in which slot each worked."""
    return [
        _span(
            "Grade", entry["slot"], row["sample_id"], entry["start"], entry["start"] + entry["seconds"],
            entry["status"], told | {"grader": entry["grader"], "score": entry["score"]},
        )
        for entry in json.loads(row.get("grades") or "[]")
        if entry.get("slot") and _is_time(entry.get("start"))
    ]  # fmt: skip


def _scorer_calls(row: Mapping[str, Any], told: dict[str, Any]) -> list[Span]:
    """A span for each scorer that looked at the sample."""
    return [
        _span("Score", call["scorer"], row["sample_id"], call["start"], call["end"], "ok", told)
        for call in json.loads(row.get("scoring") or "[]")
    ]


def _span(stage: str, lane: str, name: str, start: float, end: float, status: str, told: dict[str, Any]) -> Span:
    return Span(stage, lane, name, start, max(start, end), status, {**told, "status": status} if told else {})


def _is_time(value: Any) -> bool:
    """False for what a stage writes that never began: None, NaN or 0."""
    return value is not None and math.isfinite(value) and value > 0


def overlaps(spans: Iterable[Span]) -> dict[int, Interval]:
    """Iteration -> (first grade start, last generate end), for the iterations with both."""
    first_grade: dict[int, float] = {}
    last_generate: dict[int, float] = {}
    for span in spans:
        if span.stage == "Grade":
            iteration = span.args["iteration"]
            first_grade[iteration] = min(span.start, first_grade.get(iteration, math.inf))
        elif span.stage == "Generate":
            iteration = span.args["iteration"]
            last_generate[iteration] = max(span.end, last_generate.get(iteration, 0.0))
    return {i: (first_grade[i], last_generate[i]) for i in sorted(first_grade.keys() & last_generate.keys())}


def calls(spans: Iterable[Span], stage: str) -> list[Interval]:
    """The stage's calls. Samples of one batch share lane, start and end, and are one call."""
    return [(start, end) for _, start, end in {(s.lane, s.start, s.end) for s in spans if s.stage == stage}]


def natural(name: str) -> list[Any]:
    """Sort key that puts engine-2 before engine-10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in re.split(r"([0-9]+)", name)]
