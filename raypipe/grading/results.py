"""Replies of grader processes, and the columns that Grade adds to a sample.

In: what a grader process sent. Out: one `Grade` a grader and sample, and their combination, the GRADE_COLUMNS of
`rows.py`. A failure is a status and a NaN score, never a zero.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypipe.config import GraderConfig

# From best to worst; a sample's status is the worst over its graders. An abstaining grader is left out of the sum, and a
# sample abstains when all its graders do.
SEVERITY = ("ok", "error", "timeout", "crash")


@dataclass(frozen=True)
class Reply:
    """How one call of a grader ended.

    status: ok | error (it raised, or returned no list of scores) | timeout | crash (its process ended, or an exception
        that is no `Exception`) | lost (the machine that ran it is gone; says nothing about the samples)
    entries: for ok, one {"score": float | None, "values": dict} or {"error": str} a sample
    retry: the error says that a server could not be reached
    ended: the process is gone and needs `ready()` before the next call
    """

    status: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    retry: bool = False
    ended: bool = False


@dataclass(frozen=True)
class Grade:
    """One grader's opinion of one sample: status of GRADE_STATUSES, the raw score if ok, named values, and the call."""

    status: str
    score: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    batch: int = 0
    slot: str = ""
    start: float = 0.0


def valid_entries(entries: Any, count: int) -> bool:
    """Whether `entries` is what a grader process sends for `count` samples; a process that sends else is not to be trusted."""
    return isinstance(entries, list) and len(entries) == count and all(map(_valid_entry, entries))


def _valid_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if "error" in entry:
        return isinstance(entry["error"], str)
    score = entry.get("score")
    finite = score is None or (isinstance(score, float | int) and math.isfinite(score))
    return finite and isinstance(entry.get("values"), dict)


def grade_of(entry: dict[str, Any], reply: Reply, batch: int, slot: str, start: float) -> Grade:
    call = {"seconds": reply.seconds, "batch": batch, "slot": slot, "start": start}
    if "error" in entry:
        return Grade("error", error=entry["error"], **call)
    status = "abstain" if entry["score"] is None else "ok"
    return Grade(status, entry["score"], entry["values"], **call)


def combine(graders: Sequence[tuple[str, GraderConfig]], grades: Sequence[Grade], end: float) -> dict[str, Any]:
    """The GRADE_COLUMNS of one sample from its graders' opinions (aligned with `graders`; names come with them)."""
    failed = [grade.status for grade in grades if grade.status in SEVERITY[1:]]
    opinions = [
        (spec.weight, grade.score) for (_, spec), grade in zip(graders, grades, strict=True) if grade.status == "ok"
    ]
    status = max(failed, key=SEVERITY.index) if failed else "ok" if opinions else "abstain"
    score = sum(weight * value for weight, value in opinions if value is not None) if status == "ok" else math.nan
    details = [
        {
            "grader": name,
            "status": grade.status,
            "score": grade.score,
            "weight": spec.weight,
            "values": grade.values,
            "error": grade.error,
            "seconds": round(grade.seconds, 6),
            "batch": grade.batch,
        }
        for (name, spec), grade in zip(graders, grades, strict=True)
    ]
    return {
        "score": score,
        "grade_status": status,
        "grades": json.dumps(details),
        "grader": ",".join(dict.fromkeys(grade.slot for grade in grades if grade.slot)),
        "grade_start": min((grade.start for grade in grades if grade.start), default=end),
        "grade_end": end,
    }


def ungraded(error: str) -> dict[str, Any]:
    """The GRADE_COLUMNS of a sample that no grader was called for."""
    now = time.time()
    return combine([("", GraderConfig(path=""))], [Grade("error", error=error, start=now)], now)
