"""Cuts one scalar expression into tokens, with the exact value of every number.

In: text in the notation of math_text.normalise. Out: tokens, in one pass. The one decision: decimals, also repeating
ones, are exact fractions from the start, so nothing later rounds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from graders import math_number as number
from graders.math_number import Number

MAX_TOKENS = 4_000
MAX_FACTORIALS = 100  # a factorial of a value that is no integer takes milliseconds
GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron rho varrho "
    "sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega "
    "ell hbar".split()
)
ACCENTS = "vec|hat|bar|tilde|overline|overrightarrow|widehat|widetilde|dot"
CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}

_TOKEN = re.compile(
    rf"""\s*(?:
      (?P<repeating>\d*\.\d*(?:\\dot\{{\d\}}\d*\\dot\{{\d\}}|\\(?:overline|bar|dot)\{{\d+\}}|\(\d+\)))
    | (?P<endless>\d*\.\d+…)
    | (?P<number>\d+(?:\.\d+)?|\.\d+)
    | (?P<name>(?:\\(?:{ACCENTS})\{{[^{{}}]*\}}|\\(?:{"|".join(sorted(GREEK, key=len, reverse=True))})(?![a-zA-Z])
               |“[A-Za-z]”|[A-Za-z])(?:_(?:\{{[^{{}}]*\}}|[A-Za-z0-9]))?'*)
    | (?P<command>\\[a-zA-Z]+)
    | (?P<open>[(\[{{⌊⌈])
    | (?P<close>[)\]}}⌋⌉])
    | (?P<operator>[-+*/^!|π√°_])
    )""",
    re.VERBOSE,
)


class Unreadable(ValueError):
    """The text is not a scalar expression that is known here."""


@dataclass(frozen=True)
class Token:
    kind: str  # number, value, name, command, open, close, operator
    text: str
    value: Number = None


def tokenise(text: str) -> Iterator[Token]:
    """Raises Unreadable at the first character that no token begins with."""
    position, count = 0, 0
    text = text.strip()
    if text.count("!") + text.count("\\binom") > MAX_FACTORIALS:
        raise Unreadable("too many factorials")
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or (count := count + 1) > MAX_TOKENS:
            raise Unreadable(text[position : position + 20])
        position, kind, body = match.end(), match.lastgroup or "", match.group().strip()
        if kind == "number":
            yield Token("number", body, decimal(body))
        elif kind in ("repeating", "endless"):
            yield Token("value", body, _repeating(body))
        elif kind == "name":
            yield Token("name", re.sub("[“”{}]", "", body))
        else:
            yield Token(kind, body)


def decimal(text: str) -> Number:
    """The exact value of digits with or without a point."""
    whole, _, fraction = text.partition(".")
    return number.divide(number.integer(whole + fraction or "0"), number.power(Fraction(10), Fraction(len(fraction))))


def _repeating(text: str) -> Number:
    r"""0.1\overline{6}, 0.\dot{1}2\dot{3}, 0.(3), 0.1666…: the period is exact; digits that show none are refused."""
    if text.endswith("…"):
        match = re.fullmatch(r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,12}?)\4+)…", text)
        if match is None:
            raise Unreadable("no period: " + text[:40])
        whole, start, period = match[1], match[2], match[3] or match[4]
    else:
        whole, _, tail = text.partition(".")
        start, period = re.match(r"(\d*)(.*)", tail, re.DOTALL).groups()  # type: ignore[union-attr]
        period = re.sub(r"\D", "", period)
    ten = number.power(Fraction(10), Fraction(len(start)))
    nines = number.integer("9" * len(period))
    return number.add(decimal(f"{whole}.{start}"), number.divide(number.integer(period), number.multiply(nines, ten)))
