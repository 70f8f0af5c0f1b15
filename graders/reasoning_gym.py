r"""reasoning-gym: its own scorers on its own tasks (https://github.com/open-thought/reasoning-gym, version 0.1.25).

In: a response and the entry that the library generated, `extra_info["entry"]` = {question, answer, metadata}, as a dict
or as its JSON text. Out: what the task's scorer gives for the answer found in the response, from 0 to 1.

    graders:
      - path: graders.reasoning_gym:ReasoningGymGrader
        kwargs: {binary: true}

The task is `entry["metadata"]["source_dataset"]`, else what follows "reasoning_gym/" in the data source.

The design decision: entries survive JSON. Scores of all 105 generators are the same for an entry and for its JSON copy,
except that two tasks compare with tuples, which are made again here. Some scorers call `eval` or sympy's `parse_expr`
(which is `eval`) on the answer; here nothing of a model's is evaluated but literals and formulas of known names.
Importing the library takes about 1.5 s (sympy, matplotlib), so the constructor does it, not the import of this file.
"""

import ast
import difflib
import importlib
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from graders.exact import EXTRACTORS, after_thinking, marked_or_whole

Scorer = Callable[..., float]

# Modules of reasoning-gym 0.1.25 whose scorers call eval() on the answer, expecting a list written in Python.
EVALUATES_ANSWER = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
# Tasks whose scorers give the answer to sympy.parse_expr.
PARSES_ANSWER = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
# Tasks that compare the answer with metadata["output"] as a tuple of tuples, which JSON turns into lists.
OUTPUT_IS_TUPLES = ("arc_agi", "rearc")

FORMULA_NAMES = frozenset(
    "Abs E I abs acos acosh acot asec asin asinh atan atanh cos cosh cot csc exp ln log pi sec sign sin sinh sqrt tan "
    "tanh".split()
)
EXTRACT = {"auto": marked_or_whole, **{name: EXTRACTORS[name] for name in ("answer_tag", "boxed", "whole")}}


class ReasoningGymGrader:
    r"""Scores responses to reasoning-gym entries.

    Args:
        extract: where the answer is: in the last `answer_tag`, the last `boxed`, the `whole` response without white
            space at its ends, or `auto`: the first of these three that is there. Thinking is dropped first; no answer
            scores 0.0.
        binary: 1.0 where the scorer gives at least 1, else 0.0. Without it wrong answers can earn a little: many
            scorers give 0.01 or 0.05 for one that can be parsed, or part of 1 for one that contains the key.
        task: the task of every row, for entries that do not say.

    Raises:
        ValueError: unknown `extract` or `task`; when called: a row without an entry, or of an unknown task.

    A scorer that fails on an answer (some do where the answer has the wrong JSON type) has read no answer: 0.0, with
    `scorer_error: 1.0` to be logged, as it can also mean a damaged entry.
    """

    def __init__(self, extract: str = "auto", binary: bool = False, task: str | None = None) -> None:
        if extract not in EXTRACT:
            raise ValueError(f"extract={extract!r} is unknown: choose one of {', '.join(EXTRACT)}")
        self.extract = EXTRACT[extract]
        self.binary = binary
        self.task = task
        import reasoning_gym  # noqa: F401  here, not with the first sample, whose deadline would pay for it

        if task is not None:
            _scorer(task)

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float | dict[str, float]]:
        samples = zip(data_sources, solution_strs, extra_infos, strict=True)
        return [self._score(source, response, _entry(info)) for source, response, info in samples]

    def _score(self, source: str, response: str | None, entry: dict[str, Any]) -> float | dict[str, float]:
        task = self.task or entry["metadata"].get("source_dataset") or source.removeprefix("reasoning_gym/")
        scorer = _scorer(task)
        answer = self._answer(response)
        if answer is None:
            return 0.0
        if task in PARSES_ANSWER and not _is_plain_formula(answer):
            answer = ""  # what the scorer would find unreadable, too
        if task in OUTPUT_IS_TUPLES:
            output = tuple(tuple(row) for row in entry["metadata"]["output"])
            entry = {**entry, "metadata": {**entry["metadata"], "output": output}}
        try:
            score = float(scorer(answer=answer, entry=entry))
        except Exception:  # the untrusted boundary: what a scorer raises depends on the answer
            return {"score": 0.0, "scorer_error": 1.0}
        return float(score >= 1.0) if self.binary else score

    def _answer(self, response: str | None) -> str | None:
        text = after_thinking(response)
        found = None if text is None else self.extract(text)
        return None if found is None else found.strip() or None


def _entry(info: dict[str, Any] | None) -> dict[str, Any]:
    entry = (info or {}).get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    if not isinstance(entry, dict) or "answer" not in entry or not isinstance(entry.get("metadata"), dict):
        raise ValueError(
            f'extra_info["entry"]={str(entry)[:200]}: needs {{question, answer, metadata}}, an item of '
            "reasoning_gym.create_dataset(...)"
        )
    return entry


@lru_cache
def _scorer(task: str) -> Scorer:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS or task == "composite":  # entries of a composite name the task that they came from
        near = difflib.get_close_matches(task, DATASETS) or sorted(DATASETS)
        raise ValueError(f"reasoning-gym has no task {task!r}; near: {', '.join(near[:5])}")
    for name in EVALUATES_ANSWER:
        # The module's own global hides the builtin, so that its scorer reads lists but runs nothing.
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    return get_score_answer_fn(task)


def _is_plain_formula(answer: str) -> bool:
    """Whether sympy may evaluate it: numbers, one-letter symbols, known functions, arithmetic, and nothing else."""
    if re.search(r"[^\w\s.+\-*/^(),]|\.\s*[^\W\d]|__", answer):  # strings, attributes, indices, keywords, assignments
        return False
    names = re.findall(r"[^\W\d]+", re.sub(r"\d+\.?\d*(?:[eE][+-]?\d+)?", " ", answer))
    return all(name in FORMULA_NAMES or len(name) == 1 for name in names)
