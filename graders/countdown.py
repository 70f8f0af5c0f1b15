"""Countdown: does a formula make the target from the given numbers, each used once?

In: a response and {"numbers": [...], "target": N}: reasoning-gym's `extra_info["entry"]["metadata"]`, or the ground
truth (TinyZero's files). Out: 1.0 if so; else `partial` times how far the formula's numbers are the given ones.

    graders:
      - path: graders.countdown:CountdownGrader
        kwargs: {partial: 0.2}

The partial credit is the decision: one that any formula earns teaches a small model to write the same formula always,
after which all scores of a group are equal and nothing more is learnt. Formulas have + - * / and parentheses, are
computed with exact fractions, and nothing of the model's is evaluated as Python.
"""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graders.exact import after_thinking, marked_or_whole

# What a formula is parsed to.
NODES = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# Beyond this a text is no formula of a few numbers, and takes the parser long.
MAX_CHARACTERS = 200


class CountdownGrader:
    """Scores formulas; the one that counts is in the last `<answer>`, else the last `\\boxed`, else the whole response.

    Each score is a dict: `score`, and `numbers`, the share of numbers that are right: those that formula and task have
    in common, by the larger of their counts.

    Args:
        partial: score of a wrong formula with the right numbers, from 0 to 1.

    Raises:
        ValueError: `partial` out of range; when called: a row without numbers and target.
    """

    def __init__(self, partial: float = 0.2) -> None:
        if not 0 <= partial <= 1:
            raise ValueError(f"CountdownGrader: partial={partial!r} must be from 0 to 1")
        self.partial = partial

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str | None],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any] | None],
    ) -> list[dict[str, float]]:
        samples = zip(solution_strs, ground_truths, extra_infos, strict=True)
        return [self._score(response, *_task(key, info)) for response, key, info in samples]

    def _score(self, response: str | None, numbers: Counter[int], target: Fraction) -> dict[str, float]:
        formula = _formula(response)
        if formula is None:
            return {"score": 0.0, "numbers": 0.0}
        values = (node.value for node in ast.walk(formula) if isinstance(node, ast.Constant))
        used = Counter(value for value in values if isinstance(value, int))
        share = (used & numbers).total() / max(used.total(), numbers.total())
        try:
            is_right = share == 1 and _value(formula) == target
        except ZeroDivisionError:
            is_right = False
        return {"score": 1.0 if is_right else self.partial * share, "numbers": share}


def _task(key: Any, info: dict[str, Any] | None) -> tuple[Counter[int], Fraction]:
    """A row's numbers and target. Raises ValueError where it has none."""
    entry = (info or {}).get("entry")
    found = json.loads(entry) if isinstance(entry, str) else entry
    task = found["metadata"] if isinstance(found, dict) and isinstance(found.get("metadata"), dict) else key
    if not isinstance(task, dict) or "numbers" not in task or "target" not in task:
        raise ValueError(
            f"ground_truth={str(key)[:100]!r}: needs {{numbers, target}}, there or in extra_info['entry']['metadata'], "
            "an item of reasoning_gym.create_dataset('countdown')"
        )
    return Counter(int(number) for number in task["numbers"]), Fraction(task["target"])


def _formula(response: str | None) -> ast.expr | None:
    text = after_thinking(response)
    if text is None:
        return None
    formula = marked_or_whole(text).strip()
    if len(formula) > MAX_CHARACTERS or not re.fullmatch(r"[\d\s()+\-*/]+", formula):
        return None
    try:
        parsed = ast.parse(formula, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return parsed if all(isinstance(node, NODES) for node in ast.walk(parsed)) else None


def _value(node: Any) -> Fraction:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    return Fraction(node.value)
