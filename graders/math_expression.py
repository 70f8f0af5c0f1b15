"""Reads one scalar expression (2\\sqrt{3}, x^2+1, 3 1/2, \\ln 8) and tells whether two are equal.

In: text in the notation of math_text.normalise. Out: an Expression that can be evaluated at a point. The one decision:
no computer algebra. Two expressions are equal when they have equal values, and with free symbols when they agree at
several points (Schwartz, Zippel). Nothing is ever handed to eval.
"""

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from graders import math_number as number
from graders.math_evaluate import evaluate
from graders.math_number import Number
from graders.math_tokens import Token, Unreadable, tokenise

__all__ = ["Expression", "Unreadable", "equal", "parse", "ratio"]


# Points at which expressions with symbols are compared: six of positive coordinates between 1/4 and 32, so that
# |x - y|, floors and the like show both their sides, one of negative coordinates and one of either.
POINTS = 8


@dataclass(frozen=True)
class Expression:
    text: str
    tokens: tuple[Token, ...]
    _values: dict[int, Number] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        return frozenset(token.text for token in self.tokens if token.kind == "name" and token.text not in ("e", "i"))

    @property
    def is_symbol(self) -> bool:
        return len(self.tokens) == 1 and bool(self.symbols)

    @property
    def constant(self) -> Number:
        """The value, None if there is none (free symbols, division by zero, beyond bounds)."""
        return None if self.symbols else self.at(0)

    def at(self, index: int) -> Number:
        """The value at one of the points, None if there is none. A symbol has the same values in every expression."""
        if index not in self._values:
            try:
                self._values[index] = self.evaluate(index)
            except (ArithmeticError, Unreadable):  # a fault of syntax can stand behind a division by zero
                self._values[index] = None
        return self._values[index]

    def evaluate(self, index: int) -> Number:
        return evaluate(self.tokens, {name: _coordinate(name, index) for name in self.symbols})


def parse(text: str) -> Expression:
    """Raises Unreadable for what is not a scalar expression."""
    expression = Expression(text, tuple(tokenise(text)))
    try:
        expression._values[0] = expression.evaluate(0)  # finds faults of syntax
    except ArithmeticError:
        expression._values[0] = None
    return expression


def equal(a: Expression, b: Expression) -> bool:
    if not a.symbols and not b.symbols:
        return a.constant is not None and b.constant is not None and number.equal(a.constant, b.constant)
    return _agree((a.at(i), b.at(i)) for i in range(POINTS))


def _agree(pairs: Iterable[tuple[Number, Number]]) -> bool:
    """Whether the values at all points are equal. Points outside the domain of real roots and logarithms do not count,
    unless all are."""
    real, complex_pairs = 0, []
    for x, y in pairs:
        if x is None and y is None:
            continue
        if x is None or y is None:
            return False
        if number.left_reals(x) or number.left_reals(y):
            complex_pairs.append((x, y))
        elif number.equal(x, y):
            real += 1
        else:
            return False
    return real > 0 or (bool(complex_pairs) and all(number.equal(x, y) for x, y in complex_pairs))


def ratio(a: tuple[Expression, Expression], b: tuple[Expression, Expression]) -> Number:
    """The constant r with (a0 - a1) = r (b0 - b1), None if there is none: the equations a0 = a1 and b0 = b1 are one."""
    ratios = []
    for i in range(POINTS):
        sides = [side.at(i) for side in (*a, *b)]
        if any(side is None for side in sides):
            return None
        try:
            left, right = (number.add(x, number.negate(y)) for x, y in (sides[:2], sides[2:]))
            ratios.append(number.divide(left, right))
        except ArithmeticError:
            return None
    constant = all(number.equal(ratios[0], other) for other in ratios[1:])
    return ratios[0] if constant and not number.equal(ratios[0], Fraction(0)) else None


@functools.lru_cache(maxsize=4096)
def _coordinate(name: str, index: int) -> Fraction:
    chance = random.Random(f"{name} {index}")
    size = Fraction(round(997 * 2 ** chance.uniform(-2, 5)), 997)
    return size if index < 6 or (index == 7 and chance.random() < 0.5) else -size
