"""Arithmetic on hostile input: exact where it can be, bounded always.

In: the numbers of a model's answer. Out: values that can be told apart. The one decision: nothing is ever expanded past
MAX_BITS. A value is one of three kinds:

    Fraction   exact and small enough to write out
    Residue    exact but too large to write out (10^{10^{10}}): known only modulo one prime
    mpf, mpc   inexact (surds, logarithms, pi), to DIGITS decimal digits

What cannot be computed within bounds raises OverflowError, what has no value ZeroDivisionError; both are
ArithmeticErrors. Two closed forms that agree to DIGITS digits are taken to be equal, and so are two huge numbers that
agree modulo a prime that no answer can be made for without knowing it.
"""

import math
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

MAX_BITS = 1 << 16  # an exact value of about 20,000 decimal digits
MAX_FACTORIAL = 5_000
DIGITS = 100
# The first digits of pi in base 16, moved up to the next prime: of no special form, so no short power is 1 modulo it.
PRIME = 0x243F6A8885A308D313198A2E037073EB


class _Precision(threading.local):
    """mpmath contexts are not safe to share between threads: functions raise the precision while they run."""

    def __init__(self) -> None:
        self.mp = mpmath.MPContext()
        self.mp.dps = DIGITS


_thread = _Precision()


@dataclass(frozen=True)
class Residue:
    value: int


Number = Any  # Fraction | Residue | mpf | mpc: mpmath makes its classes at run time


def integer(digits: str) -> Number:
    """Reads decimal digits. int() refuses more than 4,300 of them, so longer ones go in pieces."""
    value = 0
    modulus = PRIME if len(digits) * 4 > MAX_BITS else 10 ** len(digits)
    for start in range(0, len(digits), 4_000):
        piece = digits[start : start + 4_000]
        value = (value * 10 ** len(piece) + int(piece)) % modulus
    return Residue(value) if modulus == PRIME else Fraction(value)


def inexact(x: Number) -> Any:
    """The value as mpf or mpc."""
    if isinstance(x, Fraction):
        return _thread.mp.mpf(x.numerator) / x.denominator
    if isinstance(x, Residue):
        raise OverflowError("too large for an approximation")
    return x


def is_real(x: Number) -> bool:
    return not hasattr(x, "imag") or isinstance(x, Fraction | Residue) or _is_tiny(x.imag, abs(x))


def left_reals(x: Number) -> bool:
    """Whether computing x went through complex values, even if it came back: the square root of -2, squared."""
    return hasattr(x, "_mpc_")


def equal(x: Number, y: Number) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    if isinstance(x, Fraction | Residue) and isinstance(y, Fraction | Residue):
        return _residue(x) == _residue(y)
    if isinstance(x, Residue) or isinstance(y, Residue):
        return False
    if any(isinstance(z, Fraction) and z.denominator.bit_length() > 2 * DIGITS for z in (x, y)):
        return False  # a decimal of that length was rounded from a value that is not rational
    x, y = inexact(x), inexact(y)
    return _is_tiny(x - y, max(abs(x), abs(y)))


def less(x: Number, y: Number) -> bool:
    """x < y for real values.

    Raises:
        OverflowError: one of them is complex or a Residue.
    """
    if isinstance(x, Residue) or isinstance(y, Residue) or not (is_real(x) and is_real(y)):
        raise OverflowError("no order")
    if equal(x, y):
        return False
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x < y
    return bool(inexact(x).real < inexact(y).real)


def add(x: Number, y: Number) -> Number:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return _bounded(x + y)
    if isinstance(x, Fraction | Residue) and isinstance(y, Fraction | Residue):
        return Residue((_residue(x) + _residue(y)) % PRIME)
    total, scale = inexact(x) + inexact(y), max(abs(inexact(x)), abs(inexact(y)))
    return Fraction(0) if _is_tiny(total, scale) else total


def multiply(x: Number, y: Number) -> Number:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        if _bits(x) + _bits(y) <= MAX_BITS:
            return x * y
    if isinstance(x, Fraction | Residue) and isinstance(y, Fraction | Residue):
        return Residue(_residue(x) * _residue(y) % PRIME)
    return inexact(x) * inexact(y)


def divide(x: Number, y: Number) -> Number:
    return multiply(x, power(y, Fraction(-1)))


def negate(x: Number) -> Number:
    return multiply(Fraction(-1), x)


def power(base: Number, exponent: Number) -> Number:
    """base to the exponent. A negative base with an odd root gives the real root, as school algebra does."""
    if isinstance(exponent, Residue):
        raise OverflowError("exponent too large")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, exponent.numerator)
    if isinstance(exponent, Fraction) and exponent.denominator <= 64:
        return _integer_power(root(base, exponent.denominator), exponent.numerator)
    base, exponent = inexact(base), inexact(exponent)
    if base == 0:
        raise ZeroDivisionError("zero to a power that is not rational")
    return _finite(_thread.mp.exp(_moderate(exponent * _thread.mp.log(base))))


def root(x: Number, degree: int) -> Number:
    """The real root where there is one, else the principal one."""
    if degree == 0:
        raise ZeroDivisionError("root of degree zero")
    if degree < 0:
        return divide(Fraction(1), root(x, -degree))
    if isinstance(x, Residue):
        raise OverflowError("root of a value too large to write out")
    if isinstance(x, Fraction):
        if x < 0 and degree % 2:
            return negate(root(-x, degree))
        if x < 0:
            return multiply(root(-x, degree), _thread.mp.expjpi(_thread.mp.mpf(1) / degree))
        top, bottom = _integer_root(x.numerator, degree), _integer_root(x.denominator, degree)
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    x = inexact(x)
    if is_real(x) and x.real < 0 and degree % 2:
        return -_thread.mp.root(-x.real, degree)
    return _thread.mp.root(x, degree)


def factorial(x: Number) -> Number:
    if isinstance(x, Fraction) and x.denominator == 1:
        if x < 0:
            raise ZeroDivisionError("factorial of a negative integer")
        if x > MAX_FACTORIAL:
            raise OverflowError("factorial too large")
        return Fraction(math.factorial(x.numerator))
    x = inexact(x)
    if abs(x) > MAX_FACTORIAL:
        raise OverflowError("factorial too large")
    return _call("gamma", x + 1)


def binomial(n: Number, k: Number) -> Number:
    if isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1:
        if not 0 <= k <= n:
            return Fraction(0)
        k = min(k, n - k)
        if k > MAX_FACTORIAL or k.numerator * n.numerator.bit_length() > MAX_BITS:
            raise OverflowError("binomial too large")
        return Fraction(math.comb(n.numerator, k.numerator))
    return divide(factorial(n), multiply(factorial(k), factorial(add(n, negate(k)))))


_QUOTIENTS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("", "cos"), "csc": ("", "sin")}
FUNCTIONS = (
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh exp ln floor ceil abs".split()
)
_MP_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh",
             "arctanh": "atanh", "ln": "log"}  # fmt: skip


def apply(name: str, x: Number) -> Number:
    """One of FUNCTIONS at x."""
    if name == "abs" and isinstance(x, Fraction):
        return abs(x)
    if name in ("floor", "ceil") and isinstance(x, Fraction):
        return Fraction(math.floor(x) if name == "floor" else math.ceil(x))
    x = _moderate(inexact(x))
    if name == "abs":
        return abs(x)
    if name in ("floor", "ceil"):
        return Fraction(int(getattr(_thread.mp, name)(x.real)))
    if name in _QUOTIENTS:
        top, bottom = _QUOTIENTS[name]
        return divide(apply(top, x) if top else Fraction(1), apply(bottom, x))
    if name in ("sin", "cos"):
        value = _call(name, x)
        return Fraction(0) if _is_tiny(value, 1) else value  # so that tan 90° has no value
    return _call(_MP_NAMES.get(name, name), x)


def logarithm(x: Number, base: Number) -> Number:
    return divide(apply("ln", x), apply("ln", base))


def constant(name: str) -> Number:
    return +{"e": _thread.mp.e, "i": _thread.mp.j, "pi": _thread.mp.pi}[name]


def _call(name: str, x: Any) -> Any:
    try:
        return _finite(getattr(_thread.mp, name)(x))
    except ValueError as error:  # mpmath's word for a pole
        raise ZeroDivisionError(str(error)) from error


def _integer_power(base: Number, exponent: int) -> Number:
    if isinstance(base, Fraction):
        if exponent < 0:
            base, exponent = 1 / base, -exponent
        if base in (0, 1, -1):
            return base ** (exponent % 2 or min(exponent, 2))
        if _bits(base) * exponent <= MAX_BITS:
            return base**exponent
    if isinstance(base, Fraction | Residue):
        residue = _residue(base) if exponent > 0 else _invert(_residue(base))
        return Residue(pow(residue, abs(exponent), PRIME))
    if exponent.bit_length() > 64:
        raise OverflowError("exponent too large")
    return _finite(base**exponent)


def _integer_root(n: int, degree: int) -> int | None:
    """The exact root of n >= 0, None where it is not an integer (or not worth the search)."""
    if degree == 1 or n < 2:
        return n
    if degree == 2:
        return math.isqrt(n) if math.isqrt(n) ** 2 == n else None
    if degree > 64 or n.bit_length() > 2_048:
        return None
    low, high = 1, 1 << (n.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= n else (low, middle - 1)
    return low if low**degree == n else None


def _bits(x: Fraction) -> int:
    return max(x.numerator.bit_length(), x.denominator.bit_length())


def _bounded(x: Fraction) -> Number:
    return x if _bits(x) <= MAX_BITS else Residue(_residue(x))


def _residue(x: Fraction | Residue) -> int:
    if isinstance(x, Residue):
        return x.value
    return x.numerator * _invert(x.denominator) % PRIME


def _invert(residue: int) -> int:
    if residue % PRIME == 0:
        raise ZeroDivisionError("division by zero modulo the prime")
    return pow(residue, -1, PRIME)


def _is_tiny(difference: Any, scale: Any) -> bool:
    return bool(abs(difference) <= _thread.mp.mpf(10) ** (10 - DIGITS) * scale)


def _moderate(x: Any) -> Any:
    if abs(x) > 1e30:
        raise OverflowError("too large for a function to have digits left")
    return x


def _finite(x: Any) -> Any:
    if not _thread.mp.isfinite(x):
        raise ZeroDivisionError("no finite value")
    return x
