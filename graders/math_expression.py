"""Reads one scalar expression (2\\sqrt{3}, x^2+1, 3 1/2, \\ln 8) and tells whether two are equal.

In: text in the notation of math_text.normalise. Out: an Expression that can be evaluated at a point. The one decision:
no computer algebra. Two expressions are equal when they have equal values, and with free symbols when they agree at
several points (Schwartz, Zippel). Nothing is ever handed to eval.
"""

import random
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from graders import math_number as number
from graders.math_evaluate import evaluate
from graders.math_number import Number
from graders.math_tokens import Token, Unreadable, tokenise

__all__ = ["Expression", "Unreadable", "agree", "equal", "parse", "ratio"]


# The sign of all coordinates at each of the fixed pseudo-random points.
SIGNS = (1, 1, 1, -1)


@dataclass(frozen=True)
class Expression:
    text: str
    tokens: tuple[Token, ...]
    _values: dict[int, Number] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
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
        point = {
            name: SIGNS[index] * Fraction(random.Random(f"{name} {index}").randrange(300, 3_000), 997)
            for name in self.symbols
        }
        return evaluate(self.tokens, point)


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
    return agree([(a.at(i), b.at(i)) for i in range(len(SIGNS))])


def agree(pairs: list[tuple[Number, Number]]) -> bool:
    """Whether the values at all points are equal. Points outside the domain of real roots and logarithms do not count,
    unless all are."""
    if any((x is None) != (y is None) for x, y in pairs):
        return False
    pairs = [(x, y) for x, y in pairs if x is not None]
    real = [(x, y) for x, y in pairs if not number.left_reals(x) and not number.left_reals(y)]
    return bool(pairs) and all(number.equal(x, y) for x, y in real or pairs)


def ratio(a: tuple[Expression, Expression], b: tuple[Expression, Expression]) -> Number:
    """The constant r with (a0 - a1) = r (b0 - b1), None if there is none: the equations a0 = a1 and b0 = b1 are one."""
    ratios = []
    for i in range(len(SIGNS)):
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
