"""Evaluates the tokens of one scalar expression at a point.

In: tokens and a value for every free symbol. Out: a number (math_number). The one decision: no syntax tree. Brackets
are folded from the inside out with an explicit list of levels, so that depth costs no recursion and any text takes
linear time; within a level the usual precedence holds.
"""

from fractions import Fraction

from graders import math_number as number
from graders.math_number import Number
from graders.math_tokens import CLOSING, Token, Unreadable

MAX_CHAIN = 50  # commands or exponents that follow one another without brackets: \\frac\\frac..., 2^2^2...


def evaluate(tokens: tuple[Token, ...], point: dict[str, Number]) -> Number:
    """Folds brackets from the inside out: each closing one turns its level into one value.

    Raises:
        Unreadable: wrong syntax.
        ArithmeticError: no value, or none within bounds.
    """
    levels: list[list[Token]] = [[]]
    openers = [""]
    for token in tokens:
        if token.kind == "open" or (token.text == "|" and not (openers[-1] == "|" and _ends_operand(levels[-1]))):
            openers.append(token.text)
            levels.append([])
        elif token.kind == "close" or token.text == "|":
            opener = openers.pop()
            if CLOSING.get(opener, opener) != token.text:
                raise Unreadable("brackets do not match")
            levels[-2].append(_fold(opener, levels.pop(), point))
        else:
            levels[-1].append(token)
    if len(levels) != 1:
        raise Unreadable("brackets do not match")
    return _Level(levels[0], point).value()


def _ends_operand(level: list[Token]) -> bool:
    return bool(level) and (level[-1].kind in ("number", "value", "name") or level[-1].text in "!π°")


def _fold(opener: str, level: list[Token], point: dict[str, Number]) -> Token:
    value = _Level(level, point).value()
    if opener in "|⌊⌈":
        value = number.apply({"|": "abs", "⌊": "floor", "⌈": "ceil"}[opener], value)
    literal = len(level) == 1 and level[0].kind == "number"
    return Token("value", opener + level[0].text if literal else opener, value)


class _Level:
    """One level of brackets: a flat list of tokens, read by precedence."""

    def __init__(self, tokens: list[Token], point: dict[str, Number]) -> None:
        self.tokens, self.point, self.position, self.chain = tokens, point, 0, 0

    def value(self) -> Number:
        result = self.sum()
        if self.position < len(self.tokens):
            raise Unreadable("left over: " + self.tokens[self.position].text)
        return result

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        return self.tokens[index] if 0 <= index < len(self.tokens) else Token("end", "")

    def take(self, *texts: str) -> str:
        """The next operator, if it is one of these, else an empty string."""
        token = self.peek()
        if token.kind != "operator" or token.text not in texts:
            return ""
        self.position += 1
        return token.text

    def sum(self) -> Number:
        result = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            result = number.add(result, term if sign == "+" else number.negate(term))
        return result

    def product(self) -> Number:
        result = self.signed()
        while operator := self.take("*", "/"):
            factor = self.signed()
            result = number.multiply(result, factor) if operator == "*" else number.divide(result, factor)
        return result

    def signed(self) -> Number:
        sign = 1
        while operator := self.take("+", "-"):
            sign = -sign if operator == "-" else sign
        result = self.fraction_literal()
        result = self.power() if result is None else result
        while self.starts_operand():
            result = number.multiply(result, self.power())
        return result if sign == 1 else number.negate(result)

    def starts_operand(self) -> bool:
        token = self.peek()
        if token.kind == "number" and self.position and self.tokens[self.position - 1].kind == "number":
            raise Unreadable("two numbers side by side")
        if token.text[:1] == "[":
            return False  # [42][0] is no product
        return token.kind in ("number", "value", "name", "command") or token.text in ("π", "√")

    def fraction_literal(self) -> Number:
        r"""3/4 x is (3/4)x; 2 1/3 and 2\frac{1}{3} are mixed numbers. None if neither is next."""
        one, two, three, four = (self.peek(i) for i in range(4))
        slashed = (one.kind, two.text, three.kind) == ("number", "/", "number")
        if slashed and four.text not in ("^", "!") and self.peek(-1).text != "/":
            self.position += 3
            return number.divide(one.value, three.value)
        if one.kind != "number" or "." in one.text + two.text + three.text + four.text:
            return None
        if two.text == "\\frac" and three.text[:1] == four.text[:1] == "{" and three.text[1:] and four.text[1:]:
            top, bottom, width = three.value, four.value, 4
        elif (two.kind, three.text, four.kind) == ("number", "/", "number"):
            top, bottom, width = two.value, four.value, 4
        else:
            return None
        if not (isinstance(top, Fraction) and isinstance(bottom, Fraction) and 0 < top < bottom):
            return None
        self.position += width
        return number.add(one.value, number.divide(top, bottom))

    def power(self) -> Number:
        result = self.postfix()
        if self.take("^"):
            result = number.power(result, self.exponent())
        return result

    def exponent(self) -> Number:
        sign = self.take("+", "-")
        result = self.operand()
        if self.take("^"):
            self.deeper(1)
            result = number.power(result, self.exponent())
            self.deeper(-1)
        return number.negate(result) if sign == "-" else result

    def deeper(self, step: int) -> None:
        self.chain += step
        if self.chain > MAX_CHAIN:
            raise Unreadable("too many in a chain")

    def postfix(self) -> Number:
        result = self.operand()
        while operator := self.take("!", "°"):
            degree = number.divide(number.constant("pi"), Fraction(180)) if operator == "°" else None
            result = number.factorial(result) if degree is None else number.multiply(result, degree)
        return result

    def operand(self) -> Number:
        token = self.peek()
        self.position += 1
        if token.kind in ("number", "value"):
            return token.value
        if token.kind == "name":
            return number.constant(token.text) if token.text in ("e", "i") else self.point[token.text]
        if token.text == "π":
            return number.constant("pi")
        self.deeper(1)
        result = self.command(token)
        self.deeper(-1)
        return result

    def command(self, token: Token) -> Number:
        if token.text == "√":
            return self.root()
        if token.text in ("\\frac", "\\binom"):
            top = self.operand()
            return (number.divide if token.text == "\\frac" else number.binomial)(top, self.operand())
        if token.kind == "command" and token.text[1:] in (*number.FUNCTIONS, "log"):
            return self.function(token.text[1:])
        raise Unreadable("no operand: " + token.text)

    def root(self) -> Number:
        degree = Fraction(2)
        if self.peek().text[:1] == "[":
            degree = self.operand()
        radicand = self.operand()
        if not isinstance(degree, Fraction) or degree.denominator != 1 or abs(degree) > 64:
            return number.power(radicand, number.divide(Fraction(1), degree))
        return number.root(radicand, degree.numerator)

    def function(self, name: str) -> Number:
        r"""\sin^2 x, \sin^{-1} x, \log_2 8; without brackets the argument is a number and the names that follow."""
        base = self.operand() if self.take("_") else None
        exponent = self.exponent() if self.take("^") else None
        if exponent == -1 and name[:3] in ("sin", "cos", "tan"):
            name, exponent = "arc" + name, None
        if self.peek().kind == "value":
            argument = self.operand()
        else:
            sign = self.take("-")
            self.deeper(1)
            argument = self.power()
            self.deeper(-1)
            while self.peek().kind == "name" or self.peek().text == "π":
                argument = number.multiply(argument, self.power())
            argument = number.negate(argument) if sign else argument
        if name == "log" or base is not None:
            result = number.logarithm(argument, Fraction(10) if base is None else base)
        else:
            result = number.apply(name, argument)
        return result if exponent is None else number.power(result, exponent)
