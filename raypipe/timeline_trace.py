"""The timeline as a Chrome trace, to open in ui.perfetto.dev (or chrome://tracing).

In: spans of `spans.collect`. Out: the trace's JSON object. One process a lane, named and in the plan's order; spans
that overlap get threads of their own; an arrow leads from each sample's generation to its grade, and counters show the
items in work. Times are microseconds since the first span. Format: "Trace Event Format", the JSON object form.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raypipe.intervals import in_work, pack
from raypipe.spans import DRIVER, RESOURCES, Span, natural

ORDER = (*RESOURCES, DRIVER)


def lanes(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    """(stage, lane) -> its spans, in the plan's order and then by lane name."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.stage, span.lane), []).append(span)
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0][0]), natural(item[0][1]))))


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The trace object of `spans`, at least one."""
    zero = min(span.start for span in spans)
    events: list[dict[str, Any]] = []
    ends: dict[str, dict[str, Any]] = {}
    for pid, ((stage, lane), items) in enumerate(lanes(spans).items(), start=1):
        rows = pack([(span.start, span.end) for span in items])
        events += _names(pid, f"{stage} {lane}", max(rows) + 1)
        for span, row in zip(items, rows, strict=True):
            event = _slice(span, zero, pid, row + 1)
            events.append(event)
            if span.name in ends:
                events += _arrow(ends[span.name], event)
            if "sample_id" in span.args:
                ends[span.name] = event
    for stage in RESOURCES:
        for time, count in in_work((span.start, span.end) for span in spans if span.stage == stage and span.busy):
            at = round((time - zero) * 1e6)
            events.append({"ph": "C", "pid": 0, "tid": 0, "ts": at, "name": f"{stage} in work", "args": {"n": count}})
    return {"traceEvents": [*_names(0, "in work", 0), *events], "displayTimeUnit": "ms"}


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    path.write_text(json.dumps(chrome_trace(spans), separators=(",", ":")), encoding="utf-8")


def _names(pid: int, process: str, threads: int) -> list[dict[str, Any]]:
    order = {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    name = {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    rows = [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": f"slot {tid}"}}
        for tid in range(1, threads + 1)
    ]
    return [name, order, *rows]


def _slice(span: Span, zero: float, pid: int, tid: int) -> dict[str, Any]:
    start, end = round((span.start - zero) * 1e6), round((span.end - zero) * 1e6)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "name": f"{span.name} ({span.status})" if span.failed else span.name,
        "cat": f"{span.stage},failed" if span.failed else span.stage,
        "args": dict(span.args),
    }


def _arrow(source: dict[str, Any], target: dict[str, Any]) -> list[dict[str, Any]]:
    """A flow event pair that binds to the slices around its two times."""
    key = {"cat": "sample", "name": "sample", "id": f"{source['name']}>{target['cat']}"}
    return [
        {"ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": source["ts"], **key},
        {"ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": target["ts"], **key},
    ]
