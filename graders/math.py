r"""Grades answers of mathematics: 1.0 if the response gives the value of the key, else 0.0.

In: responses as decoded and keys in LaTeX or plain text. Out: 1.0 or 0.0 each, as a careful person would mark them.

1. Text up to the last </think> is dropped; <think> without </think> means no answer.
2. The last \boxed{} or \fbox{} decides; if it is empty or not closed there is no answer. Boxes that one sentence joins
   by "and" or "or" form one answer, a set: two different values offered for one are wrong.
3. Without a box: the last "#### x" line, else what follows "answer is" or "Answer:", else the last number.
4. Equal value is right: fractions, exact decimals, surds, mixed numbers, percent as hundredths (a key in percent also
   takes the bare number). A rounded decimal for an exact key is wrong. Integers of any length are compared exactly.
5. A unit may be missing or added but not differ. Sets and bare lists have no order, points do, interval ends matter.
   Words ignore case; their letters are never factors.
6. An empty key is met by nothing. A list of keys is met by any of them.

The one decision: an answer is read into values by a small reader of our own (normalise, read, match) that takes linear
time at any depth and never expands a huge number. Computer algebra is kept for keys: one that goes beyond that reader
(sums, integrals, limits, determinants) is worked out once by math-verify's LaTeX parser and sympy. Responses never get
there, because a model in training finds what makes them hang: 25 nested braces take that parser seconds, 100 minutes.
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graders.math_answer import Readings, Words, read, read_sentence
from graders.math_compare import match
from graders.math_extract import after_phrase, extract, find_boxes
from graders.math_text import normalise

MAX_CHARACTERS = 10_000  # a longer answer is right only if it is the key letter by letter
_CALCULUS = re.compile(r"\\(?:sum|prod|i?int|lim|gcd|max|min|det|frac\{d\}|operatorname|begin\{vmatrix)(?![a-zA-Z])")
_HUGE = re.compile(r"\d{6}|!|\^[^^]*\^|.{300}", re.DOTALL)  # what sympy would expand, or its parser take long over
# Most answers are a number in one of these forms: Fraction reads them all.
_PLAIN = re.compile(
    r"(-?\d{1,18}(?:\.\d{1,18}|/0*[1-9]\d{0,17})?)|(-?)\\[dt]?frac\{(\d{1,18})\}\{(0*[1-9]\d{0,17})\}", re.ASCII
)


class MathGrader:
    """A batch grader (graders/contract.py) for mathematics, without options: the module says what it takes as right."""

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str | None],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float]:
        """Scores n responses; `ground_truths` are strings, numbers, None or lists of accepted ones.

        Raises:
            ValueError: a key of another type, by its index.
        """
        return [
            1.0 if any(is_right(response or "", key) for key in _accepted(truth, index)) else 0.0
            for index, (response, truth) in enumerate(zip(solution_strs, ground_truths, strict=True))
        ]


def is_right(response: str, key: str) -> bool:
    """Whether the response's answer means the same as the key."""
    answer = extract(response)
    if answer is None or not key.strip():
        return False
    if len(answer) > MAX_CHARACTERS:
        return answer.strip() == key.strip()
    plain_key, plain_answer = _PLAIN.fullmatch(key.strip()), _PLAIN.fullmatch(answer.strip())
    if plain_key and plain_answer:
        return _fraction(plain_key) == _fraction(plain_answer)
    wanted, key_readings = _read_key(key)
    given = normalise(answer)
    if not given or not wanted:
        return False
    if _compact(given) == _compact(wanted):
        return True
    return match(key_readings, read(given) + read_sentence(given))


def _fraction(plain: re.Match[str]) -> Fraction:
    return Fraction(plain[1] or f"{plain[2]}{plain[3]}/{plain[4]}")


def _compact(text: str) -> str:
    """Without spaces, save between digits, and without braces round a single character of an exponent."""
    return re.sub(r"\^\{([A-Za-z0-9])\}", r"^\1", re.sub(r"(?<!\d) | (?!\d)", "", text))


def _accepted(truth: Any, index: int) -> list[str]:
    if truth is None:
        return []
    if isinstance(truth, str):
        return [truth]
    if isinstance(truth, int | float):
        return [] if truth != truth else [str(truth)]
    if isinstance(truth, list | tuple):
        return [key for one in truth for key in _accepted(one, index)]
    raise ValueError(f"ground_truths[{index}] is {type(truth).__name__}: give a string, a number or a list of these")


@functools.lru_cache(maxsize=1024)
def _read_key(key: str) -> tuple[str, Readings]:
    """A key may come in a box, or as a worked solution that ends in #### or with a closing phrase."""
    boxes = find_boxes(key)
    if boxes and boxes[-1][2] is not None:
        key = boxes[-1][2]
    elif "####" in key:
        key = key.rsplit("####", 1)[1]
    elif "answer" in key.lower():
        key = after_phrase(key) or key
    text = normalise(key)
    readings = read(text)
    if isinstance(readings[0], Words) and _CALCULUS.search(key) and not _HUGE.search(key):
        readings += _work_out(key)
    return text, readings


def _work_out(key: str) -> Readings:
    """A key with commands that the reader does not know, computed. Slow and not bounded: for keys alone."""
    import sympy  # a second to import, and few runs need it
    from latex2sympy2_extended import NormalizationConfig, latex2sympy

    normalisation = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True)
    try:
        value = latex2sympy(key, is_real=None, normalization_config=normalisation).doit()
    except Exception:  # the parser raises bare Exceptions: then the key is met by its own text only
        return ()
    return read(normalise(sympy.latex(value, ln_notation=True)))
