"""Says whether what a program printed or returned is what was expected.

In: untrusted bytes or an untrusted tree of JSON, and the expected text or value. Out: yes or no. Nothing of the
candidate's takes part in the comparison: its value is walked as plain JSON beside the expected one.
"""

import math
import re
from typing import Any

from graders.code_driver import decode


def output_matches(stdout: bytes, expected: str, rel_tol: float | None = None) -> bool:
    """Whether a program printed what it should: spaces at line ends and blank lines at the end do not count, CR LF is
    LF. With `rel_tol`, word by word, where numbers need only be near."""
    printed = stdout.decode("utf-8", "surrogateescape")  # bytes that are no UTF-8 then equal no text
    if _tidy(printed) == _tidy(expected):
        return True
    if rel_tol is None:
        return False
    words, expected_words = printed.split(), expected.split()
    return len(words) == len(expected_words) and all(
        word == wanted or (_is_number(word) and _is_number(wanted) and _near(float(word), float(wanted), rel_tol))
        for word, wanted in zip(words, expected_words, strict=True)
    )


def _tidy(text: str) -> str:
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip(" \t") for line in lines).rstrip("\n")


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word, re.ASCII) is not None


def _near(value: Any, expected: Any, rel_tol: float) -> bool:
    """Within `rel_tol` of the expected number, as a fraction of it (of 1 where it is 0)."""
    try:
        return abs(value - expected) <= rel_tol * (abs(expected) or 1.0) < math.inf
    except OverflowError:  # an integer beyond any float
        return False


def value_matches(tree: Any, expected: Any, rel_tol: float | None = None) -> bool:
    """Whether a value is the expected one.

    A tuple counts as a list and 4.0 as 4 and True as 1; NaN equals nothing.

    Args:
        tree: the value as parsed from `code_driver.encode`'s text. It is walked, not built: a dict or set made of
            hostile keys could take for ever.
        expected: None, bool, int, float, complex, str, bytes, or lists, tuples and dicts of them.
        rel_tol: numbers match within this fraction of the expected one.

    Raises:
        Exception: of any kind, where the tree is not of `encode`'s making.
    """
    ((kind, content),) = tree.items() if isinstance(tree, dict) else [(type(tree).__name__, tree)]
    if kind in ("list", "tuple"):
        return (
            isinstance(expected, list | tuple)
            and len(content) == len(expected)
            and all(value_matches(item, wanted, rel_tol) for item, wanted in zip(content, expected, strict=True))
        )
    if kind == "dict":
        if not isinstance(expected, dict) or len(content) != len(expected):
            return False
        missing = dict(expected)
        for key_tree, item in content:
            key = _read_key(key_tree)
            if key not in missing or not value_matches(item, missing.pop(key), rel_tol):
                return False
        return True
    if kind in ("set", "frozenset"):
        return False
    value = decode(tree)
    numbers = isinstance(value, int | float | complex) and isinstance(expected, int | float | complex)
    if numbers and rel_tol is not None and _near(value, expected, rel_tol):
        return True
    return (numbers or type(value) is type(expected)) and bool(value == expected)


def _read_key(tree: Any) -> Any:
    """A dict key: a scalar or a tuple of them."""
    if isinstance(tree, dict) and "tuple" in tree:
        return tuple(_read_key(item) for item in tree["tuple"])
    if isinstance(tree, list) or (isinstance(tree, dict) and not tree.keys() <= {"int", "float", "bytes", "complex"}):
        raise ValueError("not a dict key that a literal can have")
    return decode(tree)
