"""The samples that a person reads: the best, the worst and the failed of an iteration, as JSON lines.

In: an iteration's rows (columns of rows.py, and the learner's `advantage`). Out: `samples/it_000012.jsonl`. Decision:
what a model wrote is data, whoever looks at it: characters that could steer a terminal or reverse the text are written
as escapes, in the file (where JSON reads them back unchanged) as on the console (`terminal_safe`).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

KINDS = ("best", "worst", "failed")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def terminal_safe(text: str) -> str:
    """`text` on one line, with every character that does not print (controls, bidirectional marks, lone surrogates,
    separators other than the space) as its Python escape: ESC as \\x1b, a line's end as \\n."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _ESCAPES.get(char) or _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def write_samples(path: Path, rows: Iterable[Row], count: int) -> None:
    """Writes up to `count` of the best, of the worst and of the failed samples of each purpose, one JSON object a line.

    Each has: kind (best | worst | failed), purpose, sample_id, iteration, prompt_id, data_source, prompt, response,
    ground_truth, extra_info, score and advantage (null where there is none), status, grades (one object a grader),
    prompt_length and response_length (tokens), finish_reason, generate_error.
    """
    path.write_text("".join(to_json(sample) + "\n" for sample in pick(rows, count)), encoding="utf-8")


def pick(rows: Iterable[Row], count: int) -> list[dict[str, Any]]:
    """The samples that `write_samples` writes, with its fields."""
    by_purpose: dict[str, list[Row]] = {}
    for row in rows:
        by_purpose.setdefault(row["purpose"], []).append(row)
    return [
        {"kind": kind, **describe(row)}
        for purpose in sorted(by_purpose, reverse=True)  # train first
        for kind, row in choose(by_purpose[purpose], count)
    ]


def choose(rows: Sequence[Row], count: int) -> list[tuple[str, Row]]:
    """(kind, row) of up to `count` rows of each kind; none twice. Among equals, those of many prompts come first."""
    order = sorted(rows, key=lambda row: (row["member"], row["group_id"], row["sample_id"]))
    scored = sorted((row for row in order if row["grade_status"] == "ok"), key=lambda row: -row["score"])
    failed = [row for row in order if row["grade_status"] not in ("ok", "abstain")]
    best = scored[: min(count, math.ceil(len(scored) / 2))]
    left = sorted(scored[len(best) :], key=lambda row: row["score"])
    chosen = zip(KINDS, (best, left[:count], failed[:count]), strict=True)
    return [(kind, row) for kind, rows_of_kind in chosen for row in rows_of_kind]


def describe(row: Row) -> dict[str, Any]:
    """The fields that `write_samples` names, but for `kind`."""
    return {
        "purpose": row["purpose"],
        "sample_id": row["sample_id"],
        "iteration": row["iteration"],
        "prompt_id": row["prompt_id"],
        "data_source": row["data_source"],
        "prompt": row["prompt_text"],
        "response": row["response_text"],
        "ground_truth": json.loads(row["ground_truth"] or "null", parse_constant=lambda name: None),
        "extra_info": json.loads(row["extra_info"] or "{}", parse_constant=lambda name: None),
        "score": _number(row["score"]),
        "advantage": _number(row.get("advantage")),
        "status": row["grade_status"],
        "grades": json.loads(row["grades"] or "[]", parse_constant=lambda name: None),  # NaN is not JSON
        "prompt_length": len(row["prompt_ids"]),
        "response_length": len(row["response_ids"]),
        "finish_reason": row["finish_reason"],
        "generate_error": row["generate_error"],
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def to_json(value: Any) -> str:
    """JSON on one line that is readable in every language and safe to print."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else re.sub(r"[^ -~]", _json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]
