"""Training and held-out prompts from one reasoning-gym task, as JSONL in verl's schema.

    python examples/make_reasoning_gym.py --task chain_sum --size 4000 --heldout 128 --config max_terms=2 --out FOLDER

In: a task of the reasoning-gym library and settings of its generator. Out: FOLDER/train.jsonl and FOLDER/heldout.jsonl,
to be graded by `graders.reasoning_gym:ReasoningGymGrader`. The decision: a question stands in one of the two files and
there once, whatever the generator repeats; what it cannot make unique is an error, not a shorter file.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import reasoning_gym
import yaml
from reasoning_gym.factory import DATASETS

INSTRUCTION = "Give the answer alone."
# A task whose next this many entries bring no new question is taken to have no more.
ENTRIES_A_ROUND = 2000
SEED_DISTANCE = 100_000_007


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True, help="name of a reasoning-gym task, e.g. chain_sum")
    parser.add_argument("--size", type=int, default=4000, help="training prompts (default: 4000)")
    parser.add_argument("--heldout", type=int, default=128, help="held-out prompts (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator and the split (default: 0)")
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the task's generator, e.g. max_terms=2",
    )
    parser.add_argument("--instruction", default=INSTRUCTION, help=f"follows the question (default: {INSTRUCTION!r})")
    parser.add_argument("--system", default="", help="system message before the question (default: none)")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    options = parser.parse_args(arguments)
    try:
        settings = dict(read_setting(text) for text in options.config)
        entries = unique_entries(options.task, options.size + options.heldout, options.seed, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_split(entries, options.heldout, options.out, options.instruction, options.system)
    print(f"{options.size} training and {options.heldout} held-out prompts of {options.task} in {options.out}")
    return 0


def read_setting(text: str) -> tuple[str, Any]:
    """`max_terms=2` as ("max_terms", 2)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--config {text}: write KEY=VALUE, e.g. max_terms=2")
    return name, yaml.safe_load(value)


def unique_entries(task: str, count: int, seed: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` entries {question, answer, metadata} of `task` with different questions, in an order drawn by `seed`.

    Raises:
        ValueError: an unknown task or setting, or a task that has fewer questions.
    """
    if task not in DATASETS:
        raise ValueError(f"--task {task}: reasoning-gym has no such task; it has {', '.join(sorted(DATASETS))}")
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, 1 << 40, ENTRIES_A_ROUND):
        before = len(found)
        try:
            # Entry i of seed s is often entry i - 1 of seed s + 1: a round goes on where the one before it ended.
            generator = reasoning_gym.create_dataset(
                task, seed=seed * SEED_DISTANCE + start, size=ENTRIES_A_ROUND, **settings
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"--config {settings}: {task} refuses it: {error}") from None
        for entry in generator:
            found.setdefault(entry["question"], entry)
            if len(found) == count:
                break
        if len(found) == count:
            break
        if len(found) == before:
            raise ValueError(
                f"{task} gave {before} different questions and then none in {ENTRIES_A_ROUND} entries, but --size and "
                f"--heldout ask for {count}; ask for fewer, or widen the task with --config"
            )
    entries = list(found.values())
    random.Random(seed).shuffle(entries)
    return entries


def write_split(
    entries: list[dict[str, Any]], heldout: int, folder: Path, instruction: str = INSTRUCTION, system: str = ""
) -> None:
    """Writes the first `heldout` entries to heldout.jsonl and the others to train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", entries[:heldout]), ("train", entries[heldout:])):
        # Some generators leave numbers such as Fraction in an entry's metadata, which no scorer reads.
        rows = [verl_row(entry, i, instruction, system) for i, entry in enumerate(part)]
        lines = [json.dumps(row, default=str) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def verl_row(entry: dict[str, Any], index: int, instruction: str = INSTRUCTION, system: str = "") -> dict[str, Any]:
    """One entry as a row in verl's schema; the grader finds the whole entry in extra_info."""
    task = entry["metadata"]["source_dataset"]
    question = {"role": "user", "content": f"{entry['question']}\n{instruction}".strip()}
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "system", "content": system}, question] if system else [question],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"entry": entry, "index": index},
    }


if __name__ == "__main__":
    sys.exit(main())
