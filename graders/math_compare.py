"""Decides whether two readings of answers mean the same, as a careful person would.

In: the readings of the key and of the answer (math_answer). Out: a bool. The one decision: each pair of kinds has one
rule, and what has none does not match. The key comes first everywhere: the rules are not symmetric (a key in percent
takes the bare number, a solved key wants a solved answer).
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from graders import math_expression, math_number, math_region, math_units
from graders.math_answer import (
    Answer,
    Based,
    Bracket,
    Choice,
    Clock,
    Listing,
    Matrix,
    Ratio,
    Readings,
    Relation,
    Scalar,
    Words,
    read,
)
from graders.math_expression import Expression, Unreadable
from graders.math_expression import equal as _equal
from graders.math_number import Number
from graders.math_words import says

MAX_PAIRS = 4_000  # comparisons of two lists, item by item


def match(key: Readings, answer: Readings) -> bool:
    """Whether any reading of the answer means the same as any reading of the key."""
    return any(_match(one, other) for one in key for other in answer)


def _match(key: Answer, answer: Answer) -> bool:
    if isinstance(key, Choice) or isinstance(answer, Choice):
        return _choices(key, answer)
    if math_region.is_set(key) or math_region.is_set(answer):
        one, other = math_region.region((key,)), math_region.region((answer,))
        if one and other:
            return math_region.equal(one, other)
    if isinstance(key, Relation) and isinstance(answer, Relation):
        return _relations(key, answer)
    if isinstance(key, Relation) or isinstance(answer, Relation):
        return _relation_and_value(key, answer)
    if isinstance(key, Listing) or isinstance(answer, Listing):
        return _listings(key, answer)
    if isinstance(key, Scalar) and isinstance(answer, Scalar):
        return _scalars(key, answer)
    if isinstance(key, Bracket | Matrix) and isinstance(answer, Bracket | Matrix):
        return _arrays(key, answer)
    if isinstance(key, Clock) and isinstance(answer, Clock):
        return _clocks(key, answer)
    if isinstance(key, Ratio | Clock) or isinstance(answer, Ratio | Clock):
        return _ratios(key, answer)
    if isinstance(key, Based) or isinstance(answer, Based):
        return _based(key, answer)
    if not (isinstance(key, Words) and isinstance(answer, Words) and key.text):
        return False
    return key.text == answer.text or says(answer.text, key.text)


def _choices(key: Answer, answer: Answer) -> bool:
    if isinstance(key, Choice) and isinstance(answer, Choice):
        return key.letter == answer.letter and (not (key.rest and answer.rest) or match(key.rest, answer.rest))
    if isinstance(key, Choice):
        return match(key.rest, (answer,))
    return isinstance(answer, Choice) and match((key,), answer.rest)


def _scalars(key: Scalar, answer: Scalar) -> bool:
    if math_units.conflict(key.unit, answer.unit) or (key.glued and not answer.unit) or (answer.glued and not key.unit):
        return False
    if not key.expression.tokens or not answer.expression.tokens:  # infinity
        return key.expression.text == answer.expression.text
    for one, other in ((key, answer), (answer, key)):
        if one.unit == "°" and not other.unit and "π" in other.expression.text:
            radians = math_expression.parse(f"({one.expression.text})°")
            return _equal(radians, other.expression)
    if key.percent == answer.percent:
        return _same_letter(key.expression, answer.expression) or _equal(key.expression, answer.expression)
    wanted, given = key.expression.constant, answer.expression.constant
    if wanted is None or given is None:
        return False
    if key.percent:
        return math_number.equal(wanted, given) or math_number.equal(_hundredth(wanted), given)
    if math_number.equal(wanted, _hundredth(given)):
        return True
    # A key above one is no share: it was asked for in percent, and the sign in the answer is a unit.
    return isinstance(wanted, Fraction) and abs(wanted) > 1 and math_number.equal(wanted, given)


def _hundredth(value: Number) -> Number:
    return math_number.multiply(value, Fraction(1, 100))


def _same_letter(key: Expression, answer: Expression) -> bool:
    return len(key.text) == 1 and key.text.isalpha() and key.text.casefold() == answer.text.casefold()


def _relations(key: Relation, answer: Relation) -> bool:
    wanted, given = _value(key), _value(answer)
    if wanted and given and wanted[0] and given[0]:
        if _base_name(wanted[0]) == _base_name(given[0]) and match(wanted[1], given[1]):
            return True
    solved = _is_constant(wanted[1]) if wanted and wanted[0] else math_region.region((key,)) is not None
    if solved or len(key.operators) != 1 or len(answer.operators) != 1:
        return False  # a solved key wants a solved answer: 2x > 6 only repeats the question
    try:
        sides = [math_expression.parse(side) for side in (*key.sides, *answer.sides)]
    except Unreadable:
        return False
    ratio = math_expression.ratio((sides[0], sides[1]), (sides[2], sides[3]))
    if ratio is None:
        return False
    one, other = key.operators[0], answer.operators[0]
    if one == other and one in "=≠":
        return True
    if not isinstance(ratio, Fraction):
        return False
    return other == (one if ratio > 0 else {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}.get(one))


def _relation_and_value(key: Answer, answer: Answer) -> bool:
    """x = 3 against 3. A key that is an equation gives its value only if it names what it is the value of."""
    relation, other = (key, answer) if isinstance(key, Relation) else (answer, key)
    assert isinstance(relation, Relation)
    if isinstance(other, Listing) and any(isinstance(item[0], Relation) for item in other.items):
        return _listings(key, answer)
    value = _value(relation)
    if value is None or (relation is key and not value[0]):
        return False
    return match(value[1], (answer,)) if relation is key else match((key,), value[1])


def _value(relation: Relation) -> tuple[str, Readings] | None:
    """Name and value of x = 3, A = 6/2 = 3, 3 = x. Without a name the last side is the value; before ≈ it is exact."""
    if set(relation.operators) - set("=≈"):
        return None
    exact = relation.operators.index("≈") + 1 if "≈" in relation.operators else len(relation.sides)
    names = [side for side in relation.sides if _is_name(side)]
    values = [side for side in relation.sides[:exact] if not _is_name(side)]
    values = values or [side for side in relation.sides if not _is_name(side)] or [relation.sides[-1]]
    readings = [read(value) for value in values]
    if any(_contradict(one[0], readings[-1][0]) for one in readings[:-1]):
        return None  # 5 = 6 offers two values
    if not names and values[-1] == "0" and len(values) > 1:
        return None  # 2x - y + 1 = 0 is an equation in its usual form and no value
    return (names[0] if names else ""), readings[-1]


def _contradict(one: Answer, other: Answer) -> bool:
    if not (isinstance(one, Scalar) and isinstance(other, Scalar)) or one.unit or other.unit or one.percent:
        return False
    values = one.expression.constant, other.expression.constant
    return None not in values and not math_number.equal(*values)


def _is_name(side: str) -> bool:
    """x, x_1, f(x), f^{-1}(x), AB, \\angle ABC, P(A), (x,y), “Area”: letters that stand for the unknown."""
    plain = re.sub(r"_\{[^{}]*\}|_\w|\^\{-1\}|[“”']", "", side).strip()
    return bool(
        re.fullmatch(r"[A-Za-z\\ ∠△°{}]*[A-Za-z][A-Za-z \\{}]*(?:\([^()]*\))?|\([a-zA-Z](?:, *[a-zA-Z])+\)", plain)
    ) and (plain not in ("e", "i"))


def _base_name(name: str) -> str:
    return re.sub(r"_\{[^{}]*\}|_\w|[“”\s]", "", name)


def _is_constant(readings: Readings) -> bool:
    first = readings[0]
    return isinstance(first, Scalar) and not first.expression.symbols


def _listings(key: Answer, answer: Answer) -> bool:
    if isinstance(key, Listing) and isinstance(answer, Listing):
        compare = _same_members if _named(key) == _named(answer) else _in_order
        return compare(key.items, answer.items)
    listing, other = (key, answer) if isinstance(key, Listing) else (answer, key)
    assert isinstance(listing, Listing)
    if isinstance(other, Bracket) and not listing.braces and other.opener + other.closer == "()":
        return _in_order(listing.items, other.items) if listing is key else _in_order(other.items, listing.items)
    return all(match(item, (answer,)) if listing is key else match((key,), item) for item in listing.items)


def _named(listing: Listing) -> bool:
    """Whether the items are values of different unknowns: x = 2, y = 5."""
    values = [_value(item[0]) for item in listing.items if isinstance(item[0], Relation)]
    return len({_base_name(value[0]) for value in values if value}) > 1


def _in_order(key: Sequence[Readings], answer: Sequence[Readings]) -> bool:
    return len(key) == len(answer) and all(match(one, other) for one, other in zip(key, answer, strict=True))


def _same_members(key: Sequence[Readings], answer: Sequence[Readings]) -> bool:
    wanted, given = _plain_numbers(key), _plain_numbers(answer)
    if wanted is not None and given is not None:
        return wanted == given
    if len(key) * len(answer) > MAX_PAIRS:
        return False
    found = [[match(one, other) for other in answer] for one in key]
    return all(any(row) for row in found) and all(any(column) for column in zip(*found, strict=True))


def _plain_numbers(items: Sequence[Readings]) -> set[Fraction] | None:
    values = set()
    for item in items:
        first = item[0]
        value = (
            first.expression.constant if isinstance(first, Scalar) and not first.unit and not first.percent else None
        )
        if not isinstance(value, Fraction):
            return None
        values.add(value)
    return values


def _arrays(key: Bracket | Matrix, answer: Bracket | Matrix) -> bool:
    if isinstance(key, Matrix) and isinstance(answer, Matrix):
        return len(key.rows) == len(answer.rows) and all(map(_in_order, key.rows, answer.rows))
    if isinstance(key, Bracket) and isinstance(answer, Bracket):
        return key.opener + key.closer == answer.opener + answer.closer and _in_order(key.items, answer.items)
    wanted, given = _vector(key), _vector(answer)
    return bool(wanted) and _in_order(wanted, given)


def _vector(array: Bracket | Matrix) -> Sequence[Readings]:
    """Entries of a point, a row or a column; empty for anything else."""
    if isinstance(array, Bracket):
        return array.items if array.opener + array.closer in ("()", "[]") else ()
    if len(array.rows) == 1 or all(len(row) == 1 for row in array.rows):
        return [cell for row in array.rows for cell in row]
    return ()


def _clocks(key: Clock, answer: Clock) -> bool:
    """7:30 p.m. is 19:30; 7:30 without a half of the day may be either."""
    written = key.seconds == answer.seconds and not (key.half and answer.half and key.half != answer.half)
    return written or (bool(key.half or answer.half) and _of_day(key) == _of_day(answer))


def _of_day(clock: Clock) -> int:
    return clock.seconds % 43_200 + 43_200 * (clock.half == "pm") if clock.half else clock.seconds


def _ratios(key: Answer, answer: Answer) -> bool:
    if isinstance(key, Scalar) and isinstance(answer, Clock) or isinstance(key, Clock) and isinstance(answer, Scalar):
        return False
    wanted, given = _parts(key), _parts(answer)
    if len(wanted) != len(given) or not wanted:
        return False
    if any(part.symbols for part in (*wanted, *given)):
        return all(_equal(one, other) for one, other in zip(wanted, given, strict=True))
    values = [(one.constant, other.constant) for one, other in zip(wanted, given, strict=True)]
    if any(None in pair for pair in values):
        return False
    try:  # a : b = c : d if and only if a d = b c
        (first, second), *rest = values
        return all(
            math_number.equal(math_number.multiply(first, other), math_number.multiply(second, one))
            for one, other in rest
        ) and not math_number.equal(first, Fraction(0))
    except ArithmeticError:
        return False


def _parts(answer: Answer) -> list[Expression]:
    """The parts of a ratio; 3/4 is 3:4 and a time may have been meant as a ratio."""
    if isinstance(answer, Ratio):
        return list(answer.parts)
    if isinstance(answer, Clock) and not answer.half:
        return [math_expression.parse(str(part)) for part in (answer.seconds // 3600, answer.seconds // 60 % 60)]
    if isinstance(answer, Scalar) and not answer.unit and not answer.percent and answer.expression.tokens:
        return [answer.expression, math_expression.parse("1")]
    return []


def _based(key: Answer, answer: Answer) -> bool:
    """1101_2 is met by 1101 (the base left out), not by 13; a key without a base also by its value in another one."""
    if isinstance(key, Based) and isinstance(answer, Based):
        return key.digits == answer.digits if key.base == answer.base else _in_ten(key) == _in_ten(answer) is not None
    if isinstance(key, Based):
        return isinstance(answer, Scalar) and answer.digits.lstrip("0").upper() == key.digits
    if not isinstance(key, Scalar) or not isinstance(answer, Based):
        return False
    return key.digits.lstrip("0").upper() == answer.digits or key.expression.constant == _in_ten(answer)


def _in_ten(number: Based) -> Fraction | None:
    try:
        return Fraction(int(number.digits, number.base)) if len(number.digits) < 1_000 else None
    except ValueError:
        return None
