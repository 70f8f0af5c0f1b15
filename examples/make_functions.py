"""Python functions of one line as programming problems with tests, as JSONL in verl's schema.

    python examples/make_functions.py --size 300 --heldout 64 --out .cache/functions

In: nothing. Out: FOLDER/train.jsonl and FOLDER/heldout.jsonl, to be graded by `graders.code:CodeGrader`. A problem is
a signature with a docstring and an example, as in HumanEval, but so easy that a model of 135 M parameters solves some;
its tests are calls with their values, so that a function which is right for some of them earns a part of the score.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

INSTRUCTION = "Write this Python function, in one ```python block and nothing else."
CALLS = 6  # the first stands in the docstring, the others are tests

# Name, docstring, argument, and the function; {a} is a number from 2 to 40.
Kind = tuple[str, str, str, Callable[[Any, int], Any]]
KINDS: list[Kind] = [
    ("add_{a}", "Return x plus {a}.", "int", lambda x, a: x + a),
    ("subtract_{a}", "Return x minus {a}.", "int", lambda x, a: x - a),
    ("times_{a}", "Return x times {a}.", "int", lambda x, a: x * a),
    ("square_plus_{a}", "Return the square of x, plus {a}.", "int", lambda x, a: x * x + a),
    ("remainder_{a}", "Return the remainder of x divided by {a}.", "int", lambda x, a: x % a),
    ("is_above_{a}", "Return True if x is greater than {a}, else False.", "int", lambda x, a: x > a),
    ("is_multiple_of_{a}", "Return True if x is a multiple of {a}, else False.", "int", lambda x, a: x % a == 0),
    ("at_least_{a}", "Return the larger one of x and {a}.", "int", lambda x, a: max(x, a)),
    ("distance_to_{a}", "Return the absolute difference of x and {a}.", "int", lambda x, a: abs(x - a)),
    ("length_plus_{a}", "Return the number of letters in x, plus {a}.", "str", lambda x, a: len(x) + a),
    ("is_longer_than_{a}", "Return True if the text x has more than {a} letters.", "str", lambda x, a: len(x) > a),
    ("add_to_each_{a}", "Return a list of the numbers of x, each plus {a}.", "list", lambda x, a: [y + a for y in x]),
    ("times_each_{a}", "Return a list of the numbers of x, each times {a}.", "list", lambda x, a: [y * a for y in x]),
    ("sum_plus_{a}", "Return the sum of the numbers in x, plus {a}.", "list", lambda x, a: sum(x) + a),
    ("count_above_{a}", "Return how many numbers in x exceed {a}.", "list", lambda x, a: sum(y > a for y in x)),
    ("contains_{a}", "Return True if {a} is in the list x, else False.", "list", lambda x, a: a in x),
]
NUMBERS = range(2, 41)
WORDS = "apple river stone cloud music paper light house garden window silver orange thunder blossom".split()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=300, help="training problems (default: 300)")
    parser.add_argument("--heldout", type=int, default=64, help="held-out problems (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the calls (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    problems = [(kind, a) for kind in KINDS for a in NUMBERS]
    if options.size + options.heldout > len(problems):
        print(f"error: there are {len(problems)} problems; ask for fewer with --size and --heldout", file=sys.stderr)
        return 1
    rows = [row(*problem, draw) for problem in draw.sample(problems, options.size + options.heldout)]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[: options.heldout]), ("train", rows[options.heldout :])):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part), encoding="utf-8")
    print(f"{options.size} training and {options.heldout} held-out problems in {options.out}")
    return 0


def row(kind: Kind, a: int, draw: random.Random) -> dict[str, Any]:
    """A problem as a row; the grader reads the tests from the ground truth."""
    name, text, argument, function = kind
    name, text = name.format(a=a), text.format(a=a)
    calls = [(x, function(x, a)) for x in (an_argument(argument, a, draw) for _ in range(CALLS))]
    (given, wanted), *others = calls
    code = f'def {name}(x):\n    """{text}\n\n    >>> {name}({given!r})\n    {wanted!r}\n    """\n'
    tests = {"type": "call", "fn": name, "cases": [{"args": [x], "expected": value} for x, value in others]}
    return {
        "data_source": "functions",
        "prompt": [{"role": "user", "content": f"{code}\n{INSTRUCTION}"}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
    }


def an_argument(kind: str, a: int, draw: random.Random) -> Any:
    """An argument of a kind; numbers are about as often below `a` as above, and often `a` or a multiple of it."""

    def number() -> int:
        return draw.choice([draw.randint(0, 2 * a), a * draw.randint(0, 3)])

    if kind == "str":
        return "".join(draw.sample(WORDS, draw.randint(1, 6)))
    return [number() for _ in range(draw.randint(2, 5))] if kind == "list" else number()


if __name__ == "__main__":
    sys.exit(main())
