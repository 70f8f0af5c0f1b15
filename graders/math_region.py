"""Sets of real numbers, so that x > 3, 3 < x and (3, \\infty) are one answer.

In: readings of math_answer. Out: a Region, or None where the answer is no such set. The one decision: a region is its
boundary points and a test of membership; two regions are equal if they agree on all their boundaries and in all gaps.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key

from graders import math_expression, math_number
from graders.math_answer import Answer, Bracket, Listing, Readings, Relation, Scalar, SetOperation, Words
from graders.math_expression import Unreadable
from graders.math_number import Number

MAX_PARTS = 20
_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}


@dataclass(frozen=True)
class Region:
    boundaries: tuple[Number, ...]  # finite ones, any order
    contains: Callable[[Number], bool]
    variable: str = ""  # the unknown that an inequality names


def equal(a: Region, b: Region) -> bool:
    if a.variable and b.variable and a.variable != b.variable:
        return False
    try:
        return all(a.contains(x) == b.contains(x) for x in _probes(a.boundaries + b.boundaries))
    except ArithmeticError:  # boundaries that cannot be put in order
        return False


def region(readings: Readings) -> Region | None:
    """The first reading that is a set of reals."""
    for answer in readings:
        try:
            if found := _region(answer):
                return found
        except ArithmeticError:  # ends that cannot be put in order
            continue
    return None


def is_set(answer: Answer) -> bool:
    """Whether the answer can only be a set: an inequality, a union. Brackets alone may be a point."""
    if isinstance(answer, Relation):
        return set(answer.operators) != {"="} and "≈" not in answer.operators
    if isinstance(answer, Listing):
        return any(is_set(item[0]) for item in answer.items)
    return isinstance(answer, SetOperation) or answer in (Words("ℝ"), Words("∅"))


def _region(answer: Answer) -> Region | None:
    if answer == Words("ℝ"):
        return Region((), lambda x: True)
    if answer == Words("∅"):
        return Region((), lambda x: False)
    if isinstance(answer, Scalar):
        value = _endpoint(answer)
        return None if value is None or _infinite(value) else _point(value)
    if isinstance(answer, Bracket):
        return _interval(answer)
    if isinstance(answer, Relation):
        return _inequality(answer) if "≈" not in answer.operators else None
    if isinstance(answer, SetOperation):
        return _combine(answer.operator, answer.parts)
    if isinstance(answer, Listing):
        relations = [item[0] for item in answer.items if isinstance(item[0], Relation)]
        intersect = answer.joined == "and" and len(relations) == len(answer.items)
        intersect = intersect or any("≠" in relation.operators for relation in relations)
        return _combine("∩" if intersect else "∪", answer.items)
    return None


def _interval(answer: Bracket) -> Region | None:
    ends = [_endpoint(item[0]) for item in answer.items]
    if len(ends) != 2 or any(end is None for end in ends) or answer.opener not in "([" or answer.closer not in ")]":
        return None
    low, high = ends
    if not _less(low, high):
        return None
    above = _comparison("≥" if answer.opener == "[" else ">", low)
    below = _comparison("≤" if answer.closer == "]" else "<", high)
    return Region(_finite(low, high), lambda x: above(x) and below(x))


def _inequality(answer: Relation) -> Region | None:
    """Only what is solved: a variable, or its absolute value, between constants. 2x > 6 is a question, no answer."""
    try:
        bounds = [_bound(side) for side in answer.sides]
    except Unreadable:
        return None
    unknown = [i for i, bound in enumerate(bounds) if bound is None]
    if len(unknown) != 1:
        return None
    at = unknown[0]
    absolute = re.fullmatch(r"\s*\|([^|]*)\|\s*", answer.sides[at])
    variable = absolute[1] if absolute else answer.sides[at]
    if not math_expression.parse(variable).is_symbol:
        return None
    tests = []
    if at > 0:
        tests.append(_comparison(_MIRRORED[answer.operators[at - 1]], bounds[at - 1]))
    if at < len(answer.operators):
        tests.append(_comparison(answer.operators[at], bounds[at + 1]))
    ends = _finite(*bounds[max(at - 1, 0) : at + 2])
    if absolute:
        ends += tuple(math_number.negate(end) for end in ends)
        return Region(ends, lambda x: all(test(math_number.apply("abs", x)) for test in tests), variable)
    return Region(ends, lambda x: all(test(x) for test in tests), variable)


def _bound(side: str) -> Number:
    """A constant or infinite side; None for one with an unknown or without a value."""
    infinity = _infinity(side)
    return _endpoint(Scalar(math_expression.parse(side))) if infinity is None else infinity


def _combine(sign: str, parts: tuple[Readings, ...]) -> Region | None:
    regions = [region(part) for part in parts[:MAX_PARTS]]
    found = [one for one in regions if one is not None]
    variables = {one.variable for one in found} - {""}
    if len(found) != len(parts) or len(variables) > 1:
        return None
    tests: dict[str, Callable[[Number], bool]] = {
        "∪": lambda x: any(one.contains(x) for one in found),
        "∩": lambda x: all(one.contains(x) for one in found),
        "∖": lambda x: found[0].contains(x) and not any(one.contains(x) for one in found[1:]),
    }
    return Region(tuple(x for one in found for x in one.boundaries), tests[sign], "".join(variables))


def _comparison(sign: str, bound: Number) -> Callable[[Number], bool]:
    def test(x: Number) -> bool:
        if not _infinite(bound) and math_number.equal(x, bound):
            return sign in "≤≥="
        if sign in "=≠":
            return sign == "≠"
        return _less(x, bound) == (sign in "<≤")

    return test


def _point(value: Number) -> Region:
    return Region((value,), lambda x: math_number.equal(x, value))


def _endpoint(answer: Answer) -> Number:
    if not isinstance(answer, Scalar):
        return None
    if not answer.expression.tokens:
        return _infinity(answer.expression.text)
    value = answer.expression.constant
    return value if value is not None and math_number.is_real(value) else None


def _infinity(text: str) -> float | None:
    return {"∞": math.inf, "+∞": math.inf, "-∞": -math.inf}.get(text.replace(" ", ""))


def _infinite(x: Number) -> bool:
    return isinstance(x, float)


def _finite(*ends: Number) -> tuple[Number, ...]:
    return tuple(end for end in ends if end is not None and not _infinite(end))


def _less(x: Number, y: Number) -> bool:
    if _infinite(x) or _infinite(y):
        return _end(x) < _end(y)
    return math_number.less(x, y)


def _end(x: Number) -> int:
    return 0 if not _infinite(x) else 1 if x > 0 else -1


def _probes(boundaries: tuple[Number, ...]) -> list[Number]:
    """All boundaries, a point in each gap between them and one beyond either end."""
    ordered = sorted(boundaries, key=cmp_to_key(lambda x, y: -1 if _less(x, y) else int(_less(y, x))))
    if not ordered:
        return [Fraction(0)]
    half = Fraction(1, 2)
    gaps = [math_number.multiply(half, math_number.add(x, y)) for x, y in zip(ordered, ordered[1:], strict=False)]
    return [
        *ordered,
        *gaps,
        *(math_number.add(end, _beyond(end, sign)) for end, sign in ((ordered[0], -1), (ordered[-1], 1))),
    ]


def _beyond(end: Number, sign: int) -> Number:
    """A step outwards that is not lost in the digits of a large end."""
    size = math_number.apply("abs", end)
    return math_number.multiply(Fraction(sign), math_number.add(Fraction(1), size))
