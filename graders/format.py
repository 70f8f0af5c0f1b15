r"""Format: does the response have the asked shape? Nothing is said about whether it is right.

In: a response and a specification. Out: 1.0 or 0.0.

    graders:
      - path: graders.format:FormatGrader
        kwargs: {spec: {kind: think_answer}}

`kind: think_answer` asks for exactly one `<think>` part, then one `<answer>` part, both with text in them, and nothing
else but white space.
`kind: regex` asks that `pattern` is found in the whole response (`mode: search`) or matches it (`mode: fullmatch`);
`flags` is a list of ASCII, DOTALL, IGNORECASE, MULTILINE, VERBOSE.
`kind: json` asks for one JSON object (strict RFC 8259, no key twice), bare or in one json fence, that has the keys in
the list `required`; `after_thinking: true` drops the thinking first.

A row may bring its own: `extra_info["format"]`, or a `ground_truth` that is such a dict, comes before the config's.
Patterns are in the dialect of the package `regex` (that of `re` and more, such as `\p{Lu}`), which unlike `re` can stop
a match that backtracks for ever: past `regex_timeout` the response scores 0.0 and `regex_timeout: 1.0` is logged.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import regex

from graders.exact import after_thinking

Check = Callable[[str], float | dict[str, float]]

FLAGS = ("ASCII", "DOTALL", "IGNORECASE", "MULTILINE", "VERBOSE")
SPEC_KEYS = {"think_answer": set(), "regex": {"pattern", "mode", "flags"}, "json": {"required", "after_thinking"}}
JSON_SPACE = " \t\r\n"


class FormatGrader:
    """Scores 1.0 where the response has the specified format, else 0.0.

    Args:
        spec: the format of all rows that bring none of their own (see the module). None: every row brings one.
        regex_timeout: seconds that one response may take against a pattern.

    Raises:
        ValueError: a spec with an unknown kind, key, mode or flag, or a pattern that is not a regular expression: from
            the constructor for `spec`, from the call for a row's own.
    """

    def __init__(self, spec: dict[str, Any] | None = None, regex_timeout: float = 1.0) -> None:
        self.regex_timeout = regex_timeout
        self.check = None if spec is None else self._build(spec)
        # Rows of one prompt, and often of one data set, share a spec.
        self._check_of_json = lru_cache(maxsize=1024)(lambda text: self._build(json.loads(text)))

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float | dict[str, float]]:
        samples = zip(solution_strs, ground_truths, extra_infos, strict=True)
        return [self._row_check(key, info)(response or "") for response, key, info in samples]

    def _row_check(self, key: Any, info: dict[str, Any] | None) -> Check:
        spec = (info or {}).get("format") or (key if isinstance(key, dict) and "kind" in key else None)
        if spec is not None:
            return self._check_of_json(json.dumps(spec, sort_keys=True))
        if self.check is None:
            raise ValueError('no format to check: give the grader kwargs.spec, or the row extra_info["format"]')
        return self.check

    def _build(self, spec: dict[str, Any]) -> Check:
        kind = spec.get("kind") if isinstance(spec, dict) else None
        if kind not in SPEC_KEYS:
            raise ValueError(f"spec={spec!r}: needs a kind, one of {', '.join(SPEC_KEYS)}")
        if unknown := spec.keys() - SPEC_KEYS[kind] - {"kind"}:
            raise ValueError(f"spec.{min(unknown)}: kind {kind} has {sorted(SPEC_KEYS[kind]) or 'no further keys'}")
        if kind == "regex":
            flags = _strings(spec, "flags", "flag names")
            return self._build_regex(spec.get("pattern"), spec.get("mode", "search"), flags)
        if kind == "json":
            required = frozenset(_strings(spec, "required", "keys"))
            return lambda text: float(_is_json_object(text, required, spec.get("after_thinking", False)))
        return lambda text: float(_is_think_answer(text))

    def _build_regex(self, pattern: Any, mode: Any, flags: list[str]) -> Check:
        if mode not in ("search", "fullmatch"):
            raise ValueError(f"spec.mode={mode!r}: choose search or fullmatch")
        if unknown := set(flags) - set(FLAGS):
            raise ValueError(f"spec.flags: {min(unknown)!r} is unknown; choose from {', '.join(FLAGS)}")
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"spec.pattern={pattern!r}: needs a regular expression")
        bits = sum(regex.RegexFlag[flag] for flag in set(flags))
        try:
            compiled = regex.compile(pattern, bits)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"spec.pattern={pattern!r} is not a regular expression: {error}") from error
        match = compiled.search if mode == "search" else compiled.fullmatch

        def check(text: str) -> float | dict[str, float]:
            try:
                return float(match(text, timeout=self.regex_timeout) is not None)
            except (TimeoutError, MemoryError):
                return {"score": 0.0, "regex_timeout": 1.0}

        return check


def _strings(spec: dict[str, Any], key: str, what: str) -> list[str]:
    value = spec.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"spec.{key}={value!r}: needs a list of {what}")
    return list(value)


def _is_think_answer(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    before, _, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")  # `closed` is empty where the tags came in another order
    return bool(closed) and not (before + between + after).strip() and _has_text(thought) and _has_text(answer)


def _has_text(part: str) -> bool:
    """Whether a reader would see something: not only white space and zero-width characters."""
    return any(char.isprintable() and not char.isspace() for char in part)


def _is_json_object(text: str, required: frozenset[str], drop_thinking: bool) -> bool:
    if drop_thinking:
        text = after_thinking(text) or ""
    text = text.strip(JSON_SPACE)
    if text[:7].lower() == "```json" and text.endswith("```") and "\n" in text:
        first_line, _, text = text[7:-3].partition("\n")
        if first_line.strip():
            return False
    try:
        # Numbers stay text: a number of 10,000 digits is valid JSON, and building it takes quadratic time.
        value = json.loads(text, parse_constant=_reject, parse_int=str, parse_float=str, object_pairs_hook=_unique)
    except (ValueError, RecursionError):  # nested past the interpreter's limit (about 1,000): RFC 8259 section 9 allows
        return False
    return isinstance(value, dict) and required <= value.keys()


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value
