"""What a run folder says, in the form that the report's page draws.

In: a run folder (see run_folder.py), of a run that has ended or still goes on. Out: one JSON-able dict a run: metrics
by name, the stage table, statuses per grader, timelines and samples. Decision: the page gets bounded data. Texts are
cut, and where there are too many samples those of evenly spaced iterations are taken, so a run of any length gives a
page that a browser opens; the page says what is left out.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypipe.metrics import legend
from raypipe.rows import GRADE_STATUSES
from raypipe.run_folder import RunFolder, read_lines
from raypipe.spans import DRIVER, RESOURCES

Line = Mapping[str, float]

MAX_TEXT = 20_000  # characters of a prompt, a response or an answer
MAX_VALUE = 2_000  # characters of a grader's error or of its named values
MAX_SPANS = 40_000  # of a timeline
SAMPLE_FIELDS = ("kind", "purpose", "sample_id", "prompt_id", "data_source", "status", "finish_reason")
NUMBER_FIELDS = ("iteration", "score", "advantage", "prompt_length", "response_length")


def read_run(path: Path, max_samples: int) -> dict[str, Any]:
    """Everything that the page shows of the run in `path`.

    Keys: name, path, config (text), iterations (N numbers), metrics (name -> N values, null where there is none),
    legend (name -> [unit, meaning]), stages, bounds (iteration, bounding, advice of each iteration), graders,
    timelines, samples, samples_of (how many samples the folder holds).

    Raises:
        ValueError: `path` is no run folder.
    """
    folder = RunFolder(path.resolve(), resumed=True)
    if not folder.metrics.is_file():
        raise ValueError(f"{path} is no run folder: it has no metrics.jsonl; name a folder such as runs/demo")
    lines = [line for line in folder.read_metrics() if _is_number(line.get("iteration"))]
    names = sorted({name for line in lines for name, value in line.items() if _is_number(value)} - {"iteration"})
    bounds = [line for line in read_lines(folder.stages) if _is_number(line.get("iteration"))]
    samples, available = read_samples(sorted(folder.path.glob("samples/it_*.jsonl")), max_samples)
    return {
        "name": folder.path.name,
        "path": str(folder.path),
        "config": _read_text(folder.path / "config.yaml"),
        "iterations": [line["iteration"] for line in lines],
        "metrics": {name: [_number(line.get(name)) for line in lines] for name in names},
        "legend": {name: entry for name in names if (entry := legend(name))},
        "stages": stage_table(lines, bounds),
        "bounds": [[line["iteration"], _text(line.get("bounding")), _text(line.get("advice"))] for line in bounds],
        "graders": grader_table(lines),
        "timelines": [trace for file in sorted(folder.path.glob("timelines/it_*.json")) if (trace := read_trace(file))],
        "samples": samples,
        "samples_of": available,
    }


def stage_table(lines: Sequence[Line], bounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a stage: `idle` (median fraction over iterations), `seconds` it was at work (median), and how often it was
    the one that bounded. The first iteration also warms everything up and is left out where there are more."""
    steady = [line for line in lines if "reward/mean" in line][1:] or lines
    often = Counter(line.get("bounding") for line in bounds)
    table = []
    for stage in RESOURCES:
        idle = _median(steady, f"idle/{stage.lower()}")
        if idle is None:
            continue
        timed = ("train", "update_weights") if stage == "Learner" else (stage.lower(),)
        seconds = [took for name in timed if (took := _median(steady, f"time/{name}_s")) is not None]
        table.append({"stage": stage, "idle": idle, "seconds": sum(seconds), "bounds": often[stage]})
    return table


def grader_table(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """A row a grader: its last and first mean score, and the count of each status over the whole run."""
    statuses: dict[str, Counter[str]] = {}
    for line in lines:
        for name, value in line.items():
            found = re.fullmatch(r"grade/([^/]+)/([a-z]+)", name)
            if found and found[2] in GRADE_STATUSES and _is_number(value):
                statuses.setdefault(found[1], Counter())[found[2]] += int(value)
    table = []
    for grader, counts in sorted(statuses.items()):
        scores = [line[f"reward/{grader}"] for line in lines if _is_number(line.get(f"reward/{grader}"))]
        first, last = (_number(scores[0]), _number(scores[-1])) if scores else (None, None)
        table.append({"grader": grader, "statuses": dict(counts), "first": first, "last": last})
    return table


def read_trace(path: Path) -> dict[str, Any] | None:
    """A timeline from its Chrome trace; None where the file is none.

    Keys: iteration, lanes (each: stage, lane, rows, spans), spans_of (how many the trace holds). A span is [row, start,
    duration, name, status], times in milliseconds since the first span.
    """
    try:
        events = json.loads(_read_text(path))["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
        slices = [event for event in events if event.get("ph") == "X"]
        lanes: dict[int, dict[str, Any]] = {}
        for event in slices[:MAX_SPANS]:
            stage, _, lane = names[event["pid"]].partition(" ")
            if stage not in (*RESOURCES, DRIVER):
                continue
            lane_of = lanes.setdefault(event["pid"], {"stage": stage, "lane": lane, "rows": 1, "spans": []})
            lane_of["rows"] = max(lane_of["rows"], event["tid"])
            told = _text(event["args"].get("status", "ok"))
            times = [round(event[name] / 1000, 3) for name in ("ts", "dur")]
            lane_of["spans"].append([event["tid"] - 1, *times, _text(event["name"], 200), told])
        iteration = int(re.findall(r"[0-9]+", path.name)[0])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {"iteration": iteration, "lanes": [lanes[pid] for pid in sorted(lanes)], "spans_of": len(slices)}


def read_samples(files: Sequence[Path], most: int) -> tuple[list[dict[str, Any]], int]:
    """Up to `most` samples, and how many there are. Of too many, whole iterations are left out, evenly."""
    by_file = [read_lines(file) for file in files]
    available = sum(map(len, by_file))
    step = 1
    while sum(len(lines) for lines in _spaced(by_file, step)) > most and step < len(by_file):
        step += 1
    found = [_sample(line) for lines in _spaced(by_file, step) for line in lines]
    return found[:most], available


def _spaced(files: Sequence[list[dict[str, Any]]], step: int) -> list[list[dict[str, Any]]]:
    """Every step-th, counted from the last one, and the first."""
    kept = list(files[::-1][::step][::-1])
    return kept if step == 1 or len(files) < 2 or (len(files) - 1) % step == 0 else [files[0], *kept]


def _sample(line: Mapping[str, Any]) -> dict[str, Any]:
    grades = line.get("grades")
    return {
        **{name: _text(line.get(name), 300) for name in SAMPLE_FIELDS},
        **{name: _number(line.get(name)) for name in NUMBER_FIELDS},
        "prompt": _text(line.get("prompt"), MAX_TEXT),
        "response": _text(line.get("response"), MAX_TEXT),
        "ground_truth": _text(line.get("ground_truth"), MAX_TEXT),
        "error": _text(line.get("generate_error"), MAX_VALUE),
        "grades": [_grade(entry) for entry in (grades if isinstance(grades, list) else [])[:32]],
    }


def _grade(entry: Any) -> dict[str, Any]:
    told = entry if isinstance(entry, dict) else {}
    return {
        "grader": _text(told.get("grader"), 100),
        "status": _text(told.get("status"), 30),
        "score": _number(told.get("score")),
        "weight": _number(told.get("weight")),
        "seconds": _number(told.get("seconds")),
        "values": _text(told.get("values") or "", MAX_VALUE),
        "error": _text(told.get("error"), MAX_VALUE),
    }


def _text(value: Any, most: int = MAX_VALUE) -> str:
    """`value` as text, JSON where it is none, cut to `most` characters with a word on what is missing."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]}\n[... {len(text) - most:,} more characters]"


def _is_number(value: Any) -> bool:
    """A finite number. Not a bool; not an integer too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _number(value: Any) -> float | None:
    """Six digits are what a curve shows."""
    return float(f"{value:.6g}") if _is_number(value) else None


def _median(lines: Iterable[Line], name: str) -> float | None:
    values = [line[name] for line in lines if _is_number(line.get(name))]
    return statistics.median(values) if values else None


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
