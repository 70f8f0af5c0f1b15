"""Reads a score from what a judge wrote.

In: the judge's text. Out: a score, or None where there is no verdict in it. The design decision: the last verdict after
the judge's own thinking counts, and one that is not on the scale is none.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from graders.exact import after_thinking

REGEX_TIMEOUT_S = 0.2


class Verdict:
    """Reads a score from a judge's text (see JudgeGrader)."""

    def __init__(
        self,
        parse: str | None,
        parse_json: str | None,
        values: Mapping[str, float] | None,
        scale: Sequence[float] | None,
    ) -> None:
        if (parse is None) == (parse_json is None):
            raise ValueError(f"parse={parse!r}, parse_json={parse_json!r}: give exactly one of the two")
        try:
            self.pattern = None if parse is None else regex.compile(parse)
        except regex.error as error:
            raise ValueError(f"parse={parse!r} is not a regular expression: {error}") from error
        self.key = parse_json
        self.values = None if values is None else {word.casefold(): float(score) for word, score in values.items()}
        if scale is not None and (len(scale) != 2 or scale[0] >= scale[1] or values is not None):
            raise ValueError(f"scale={scale!r}: needs [lowest, highest], and no values beside it")
        self.scale = scale

    def score(self, text: str) -> float | None:
        """The score, None where the text has no verdict."""
        said = after_thinking(text)
        found = None if said is None else self._find(said)
        if found is None:
            return None
        if self.values is not None:
            return self.values.get(str(found).strip().casefold())
        try:
            number = float(found)
        except (TypeError, ValueError):
            return None
        if self.scale is None:
            return number if number - number == 0.0 else None  # neither infinite nor NaN
        low, high = self.scale
        return (number - low) / (high - low) if low <= number <= high else None

    def _find(self, text: str) -> Any:
        if self.pattern is None:
            value = _last_json_object(text).get(str(self.key))
            return str(value) if isinstance(value, bool) else value
        try:
            matches = list(self.pattern.finditer(text, timeout=REGEX_TIMEOUT_S))
        except TimeoutError:
            return None
        if not matches:
            return None
        return matches[-1][1] if self.pattern.groups else matches[-1][0]


def _last_json_object(text: str) -> dict[str, Any]:
    """The last JSON object in the text that is in no other; empty where there is none."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found = value
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found
