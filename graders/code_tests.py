"""Turns a sample's ground truth into test cases.

In: a ground truth in any of the field's forms (`read_tests`). Out: `Tests`, a list of cases of three kinds: `Stdio`
(input, expected output), `Call` (one call, accepted values) and `Check` (a test program). The split is what keeps
expected values away from model code: of a `Call` only the call goes to the candidate's sandbox, and of a `Check`, which
is everything that cannot be split so, only the calls that it makes.
"""

import ast
import builtins
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

# What solutions in the style of LeetCode take for granted.
LEETCODE_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product, zip_longest
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, log2, sqrt
from typing import *
"""


@dataclass(frozen=True)
class Stdio:
    """A program is right if it prints `expected` when given `stdin`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Call:
    """A call is right if its value matches one of `accepted`. `request` as in `code_driver.candidate`."""

    request: dict[str, Any]
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class Check:
    """A candidate is right if `test`, run after `setup`, raises nothing. `names` are the candidate's functions."""

    setup: str
    names: tuple[str, ...]
    test: str


@dataclass(frozen=True)
class Tests:
    """The tests of one sample."""

    cases: Sequence[Stdio | Call | Check]
    prelude: str = ""  # code that runs before the candidate's, in the same namespace
    prompt: str = ""  # code that the candidate was asked to complete
    entry_point: str = ""  # the function that `prompt` begins
    rel_tol: float | None = None  # numbers match within this fraction of the expected one
    memory_mb: int | None = None

    def sources(self, code: str) -> list[str]:
        """What to run, in order, to define the candidate's functions: `code` may be all of it or end the prompt."""
        if not self.prompt or re.search(rf"^[ \t]*(async[ \t]+)?def[ \t]+{re.escape(self.entry_point)}\b", code, re.M):
            return [source for source in (self.prelude, self.prompt, code) if source]
        return [self.prompt + code]


def read_tests(ground_truth: Any, extra_info: dict[str, Any]) -> Tests:
    """Reads a ground truth.

    Forms:
        {"type": "stdio" | "call" | "assert", "cases": [...], "fn", "rel_tol", "memory_mb"};
        {"inputs": [...], "outputs": [...], "fn_name"} (verl's prime_code, APPS, TACO), {"assert_case": [...]};
        a list of `assert` statements, or one text of them (MBPP);
        {"prompt", "test", "entry_point"} (HumanEval), here or in `extra_info`;
        JSON text of any of these.

    Raises:
        ValueError: none of these, or a case that cannot be read; says which.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            if re.search(r"^\s*assert\b", ground_truth, re.MULTILINE):
                ground_truth = _statements(ground_truth)
    if isinstance(ground_truth, list) and ground_truth and all(isinstance(case, str) for case in ground_truth):
        ground_truth = {"type": "assert", "cases": ground_truth}
    truth = ground_truth if isinstance(ground_truth, dict) else {}
    if "assert_case" in truth:
        truth = {"type": "assert", "cases": truth["assert_case"]}
    try:
        if "type" in truth:
            tests = _read_cases(truth)
        elif "inputs" in truth and "outputs" in truth:
            tests = _read_prime(truth)
        elif "test" in (source := truth if "test" in truth else extra_info) and "entry_point" in source:
            tests = _read_humaneval(source)
        else:
            raise ValueError(
                f"ground_truth: {str(ground_truth)[:100]!r} holds no tests; give cases ({{'type', 'cases'}}), "
                "{'inputs', 'outputs'}, assert statements, or 'test' and 'entry_point' in extra_info"
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"ground_truth: a field is missing or of a wrong type: {error!r}") from error
    if not tests.cases:
        raise ValueError("ground_truth: there are no cases in it")
    return tests


def _read_cases(truth: dict[str, Any]) -> Tests:
    cases = truth["cases"]
    if truth["type"] == "stdio":
        tests = Tests([Stdio(_lines(case["input"]), _lines(case["output"])) for case in cases])
    elif truth["type"] == "call":
        tests = Tests([Call({"name": truth["fn"], "args": case["args"]}, (case["expected"],)) for case in cases])
    elif truth["type"] == "assert":
        tests = Tests([read_assert(case) for case in cases])
    else:
        raise ValueError(f"ground_truth.type: {truth['type']!r} is none of 'stdio', 'call', 'assert'")
    return replace(tests, rel_tol=truth.get("rel_tol"), memory_mb=truth.get("memory_mb"))


def _read_prime(truth: dict[str, Any]) -> Tests:
    pairs = list(zip(truth["inputs"], truth["outputs"], strict=True))
    name = truth.get("fn_name")
    if name is None:
        return Tests([Stdio(_lines(given), _lines(wanted)) for given, wanted in pairs])
    cases = []
    for given, wanted in pairs:
        if isinstance(given, str):  # one argument a line, as JSON
            given, wanted = [json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)
        # Some sets wrap the value in a list of one; nothing in the data says which do.
        accepted = (wanted, wanted[0]) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)
        cases.append(Call({"name": name, "args": given}, accepted))
    return Tests(cases, prelude=LEETCODE_PRELUDE)


def _lines(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "\n".join(text)


def _read_humaneval(source: dict[str, Any]) -> Tests:
    prompt: Any = source.get("prompt")
    name = source["entry_point"]
    try:
        ast.parse(prompt)
    except (SyntaxError, TypeError, ValueError):  # none, or one in words, or messages
        prompt = ""
    return Tests(
        [Check(setup=prompt, names=(name,), test=f"{source['test']}\n\ncheck({name})\n")],
        prompt=prompt,
        entry_point=name,
    )


def _statements(text: str) -> list[str]:
    """The asserts of a text of nothing else; any other text is one test."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return [text]
    return [ast.unparse(node) for node in body] if all(isinstance(node, ast.Assert) for node in body) else [text]


def read_assert(text: str) -> Call | Check:
    """Splits an `assert` case.

    `assert f(...) == literal` becomes a `Call`; anything else a `Check`, whose candidate functions are the names that
    it calls but does not define, less builtins and `math`'s (unless it calls only those). Modules of the standard
    library that it names are imported.

    Raises:
        ValueError: it is no Python, calls nothing of the candidate's, or tests a class otherwise than by
            `assert Class(...).method(...) == literal`.
    """
    text = textwrap.dedent(text).strip()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"ground_truth: {text[:100]!r} is not Python: {error}") from None
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unknown = loaded - _bound(nodes)
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules &= unknown & sys.stdlib_module_names
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)} & unknown
    names = called - vars(builtins).keys() - vars(math).keys()
    if not names:
        innermost = [node for node in calls if not any(isinstance(sub, ast.Call) for sub in list(ast.walk(node))[1:])]
        names = {node.func.id for node in innermost if isinstance(node.func, ast.Name)} & unknown
    if not names:
        raise ValueError(f"ground_truth: {text[:100]!r} calls no function of the candidate's")
    elsewhere = unknown - names  # names that the test takes from Python
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for call, literal in ((left, right), (right, left)):
                name = _root_name(call)
                if name in names and elsewhere <= vars(builtins).keys() and _is_literal(literal):
                    return Call({"name": name, "expression": ast.unparse(call)}, (ast.literal_eval(literal),))
    classes = [name for name in names if name[0].isupper()]
    if classes:
        raise ValueError(
            f"ground_truth: {text[:100]!r} tests the class {classes[0]}; objects do not leave the sandbox, so only "
            "`assert Class(...).method(...) == literal` is supported"
        )
    setup = [f"import {name}\n" for name in sorted(modules)]
    setup += [f"from math import {name}\n" for name in sorted(elsewhere & vars(math).keys() - vars(builtins).keys())]
    return Check("".join(setup), tuple(sorted(names)), text)


def _bound(nodes: list[ast.AST]) -> set[str]:
    """Names that the code itself gives a meaning, anywhere."""
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    aliases = [node for node in nodes if isinstance(node, ast.alias)]
    return bound | {(alias.asname or alias.name).split(".")[0] for alias in aliases}


def _root_name(node: ast.expr) -> str | None:
    """`f` of `f(...)`, `f(...).g(...)`; None for what is not a call."""
    if not isinstance(node, ast.Call):
        return None
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_literal(node: ast.expr) -> bool:
    """Whether it is a literal that `matches` can compare: no sets."""
    if any(isinstance(sub, ast.Set | ast.SetComp | ast.Call) for sub in ast.walk(node)):
        return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
