r"""Exact match: the response, or a named part of it, is the key.

In: a response and a key (text, number, truth value, or a list of acceptable ones). Out: 1.0 or 0.0.
Text is compared in Unicode form NFC, so that an accent typed as one character or as two is the same letter; nothing
else is forgiven unless asked for. Without a key (null, blank) nothing is right.

    graders:
      - path: graders.exact:ExactGrader
        kwargs:
          extract: answer_tag   # whole (default) | answer_tag | boxed | last_line
          ignore_case: true     # full Unicode case folding: STRASSE equals straße
          strip: true           # white space at both ends is dropped (default)

The functions that find the answer in a response are here for the other graders too.
"""

import unicodedata
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any


class ExactGrader:
    """Scores 1.0 where the extracted text equals the key, else 0.0.

    Args:
        strip: drop white space (any Unicode kind) at both ends of the answer and of the key.
        ignore_case: compare after full case folding.
        extract: what is compared: `whole` response, the last `answer_tag`, the last `boxed`, or the `last_line` that is
            not blank. Thinking is dropped first.

    Raises:
        ValueError: unknown `extract`; when called: a key that is neither text nor number nor a list of them.
    """

    def __init__(self, strip: bool = True, ignore_case: bool = False, extract: str = "whole") -> None:
        if extract not in EXTRACTORS:
            raise ValueError(f"extract={extract!r} is unknown: choose one of {', '.join(EXTRACTORS)}")
        self.strip = strip
        self.ignore_case = ignore_case
        self.extract = EXTRACTORS[extract]

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float]:
        return [self._score(*sample) for sample in zip(solution_strs, ground_truths, strict=True)]

    def _score(self, response: str | None, key: Any) -> float:
        text = after_thinking(response)
        answer = None if text is None else self.extract(text)
        if answer is None:
            return 0.0
        accepted = {self._normalize(text) for text in _key_texts(key) if text.strip()}
        return float(self._normalize(answer) in accepted)

    def _normalize(self, text: str) -> str:
        if self.strip:
            text = text.strip()
        if self.ignore_case:
            # Canonical caseless matching, Unicode Standard section 3.13, D145.
            text = unicodedata.normalize("NFD", text).casefold()
        return unicodedata.normalize("NFC", text)


def after_thinking(response: str | None) -> str | None:
    """The response past its last `</think>`; None where thinking began and never ended, or there is no response."""
    if response is None:
        return None
    text = response.rpartition("</think>")[2]
    return None if "<think>" in text else text


def last_answer_tag(text: str) -> str | None:
    """What the last `<answer>` holds, None where there is none or it is never closed."""
    _, tag, rest = text.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return content if tag and closed else None


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds (braces nest), None where there is none or it is never closed."""
    start = max(text.rfind(command) + len(command) if command in text else -1 for command in ("\\boxed{", "\\fbox{"))
    if start < 0:
        return None
    depth = 1
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace does not count
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at]
        at += 1
    return None


def marked_or_whole(text: str) -> str:
    r"""What the last `<answer>` holds, else the last `\boxed{}`, else all of the text."""
    marked = (last_answer_tag(text), last_boxed(text))
    return next((part for part in marked if part is not None), text)


def _key_texts(key: Any) -> list[str]:
    keys = [k for k in (key if isinstance(key, list | tuple) else [key]) if k is not None]
    for k in keys:
        if not isinstance(k, str | Number):
            raise ValueError(f"ground_truth={key!r}: exact match needs a text, a number or a list of them")
    return [str(k) for k in keys]


def last_line(text: str) -> str | None:
    """The last line that is not blank, None where all are."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), None)


def _whole(text: str) -> str:
    return text


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "whole": _whole,
    "answer_tag": last_answer_tag,
    "boxed": last_boxed,
    "last_line": last_line,
}
