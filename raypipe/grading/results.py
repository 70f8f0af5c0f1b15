"""How calls end, what a grader thinks of a sample, and the columns that Grade adds to it.

In: what a grader process sent. Out: one `Grade` a grader and sample, and their combination, the GRADE_COLUMNS of
`rows.py`. A failure is a status and a NaN score, never a zero.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypipe.config import GraderConfig, grader_name

Sample = dict[str, Any]

# From least to worst; a sample's status is the worst of its graders'.
FAILURES = ("error", "timeout", "crash")
MAX_ERROR = 4000


@dataclass(frozen=True)
class Reply:
    """How one call of a grader ended.

    status: ok | error (it raised, or returned no list of scores) | timeout | crash (its process ended, or it raised
        what ends one, such as SystemExit) | lost (the machine that ran it is gone; says nothing about the samples)
    entries: for ok, one {"score": float | None, "values": dict} or {"error": str} a sample
    seconds: time that the call took in its process
    retry: the error says that a server could not be reached
    ended: the process is gone; `ready()` of its slot returns when it is replaced
    """

    status: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    retry: bool = False
    ended: bool = False


@dataclass(frozen=True)
class Call:
    """Where and when a call ran (slot, seconds since the epoch), how long (seconds), and with how many samples."""

    slot: str
    start: float
    seconds: float
    batch: int


@dataclass(frozen=True)
class Grade:
    """One grader's opinion of one sample: a status of rows.GRADE_STATUSES, the raw score if ok, and named values."""

    status: str
    score: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    call: Call | None = None


def valid_entries(entries: Any, count: int) -> bool:
    """Whether `entries` is what `scores.py` sends for `count` samples; a process that sends else cannot be trusted."""
    return isinstance(entries, list) and len(entries) == count and all(map(_valid_entry, entries))


def _valid_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if "error" in entry:
        return isinstance(entry["error"], str)
    score = entry.get("score", "")
    finite = score is None or (isinstance(score, float) and math.isfinite(score))
    return finite and isinstance(entry.get("values"), dict)


def grades_of(reply: Reply, call: Call) -> list[Grade]:
    """The opinions that a reply holds, one a sample of its call."""
    if reply.status != "ok":
        status = "crash" if reply.status == "lost" else reply.status
        return [Grade(status, error=reply.error[:MAX_ERROR], call=call)] * call.batch
    return [
        Grade("error", error=entry["error"][:MAX_ERROR], call=call)
        if "error" in entry
        else Grade("abstain" if entry["score"] is None else "ok", entry["score"], entry["values"], call=call)
        for entry in reply.entries
    ]


def combine(graders: Sequence[GraderConfig], grades: Sequence[Grade]) -> dict[str, Any]:
    """The GRADE_COLUMNS of one sample from its graders' opinions, in the order of `graders`.

    The score is the weighted sum over the graders that have an opinion; those that abstain are left out of it. One
    failure makes the whole score NaN. A sample abstains when all its graders do.
    """
    end = time.time()
    pairs = list(zip(graders, grades, strict=True))
    failures = [grade.status for grade in grades if grade.status in FAILURES]
    opinions = [spec.weight * grade.score for spec, grade in pairs if grade.score is not None]
    status = max(failures, key=FAILURES.index) if failures else "ok" if opinions else "abstain"
    calls = [grade.call for grade in grades if grade.call]
    return {
        "score": math.fsum(opinions) if status == "ok" else math.nan,
        "grade_status": status,
        "grades": json.dumps([_detail(spec, grade) for spec, grade in pairs]),
        "grader": ",".join(dict.fromkeys(call.slot for call in calls)),
        "grade_start": min((call.start for call in calls), default=end),
        "grade_end": end,
    }


def _detail(spec: GraderConfig, grade: Grade) -> dict[str, Any]:
    """One grader's entry in the `grades` column."""
    call = grade.call or Call("", 0.0, 0.0, 0)
    return {
        "grader": grader_name(spec),
        "status": grade.status,
        "score": grade.score,
        "weight": spec.weight,
        "values": grade.values,
        "error": grade.error,
        "slot": call.slot,
        "start": call.start,
        "seconds": round(call.seconds, 6),
        "batch": call.batch,
    }


def not_graded(reason: str) -> dict[str, Any]:
    """The GRADE_COLUMNS of a sample that no grader was called for; `reason` stands where graders' opinions do."""
    return combine([GraderConfig(path="", name="none")], [Grade("error", error=reason)])
