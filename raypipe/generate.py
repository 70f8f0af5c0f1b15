"""The command `python -m raypipe.generate --config x.yaml [--model DIR] --out samples.parquet [--keep best]`.

In: a run's config: its model, data.train_files, graders, and the sampling settings of its `rollout` section. Out: a
.parquet or .jsonl file of graded samples, for rejection sampling, distillation, or a look. Decision: nothing is written
but what a person can read and another program can grade again; `python -m raypipe.grade --data samples.parquet
--grader other:Grader` does.

--keep all      every sample, with its status
       best     the best sample of each prompt (the first among equals), where any was graded ok
       score>=x samples graded ok with this score or a better one
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.config import Config
from raypipe.config_checks import check_plan
from raypipe.config_file import load_config
from raypipe.evaluate import with_model

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--model", help="model folder, e.g. runs/demo/checkpoints/step_30/hf (default: model.path)")
    parser.add_argument("--out", required=True, help="file to write, .parquet or .jsonl")
    parser.add_argument("--keep", default="all", help="all, best or score>=x (default: all)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. rollout.n=16")
    options = parser.parse_args(arguments)
    try:
        check_keep(options.keep)
        check_out(Path(options.out))
        config = load_config(options.config, with_model(options.overrides, options.model), check_generation)
        run(config, Path(options.out), options.keep)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check_generation(config: Config) -> None:
    check_plan(config)
    if not config.data.train_files:
        raise ValueError("data.train_files is empty; name the files of prompts, e.g. data.train_files=[prompts.jsonl]")


def check_out(path: Path) -> None:
    """Raises ValueError unless samples can be written to `path`, which no file has yet."""
    from raypipe.sample_files import check_samples_name

    check_samples_name(path)
    if path.exists():
        raise ValueError(f"--out {path} is there already; name another file, or remove it")


def check_keep(keep: str) -> float | None:
    """The least score of `score>=x`, None for another kind. Raises ValueError for what --keep does not know."""
    found = re.fullmatch(r"score>=(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)", keep.replace(" ", ""))
    try:
        if found:
            return float(found[1])
    except ValueError:
        pass
    if keep not in ("all", "best"):
        raise ValueError(f"--keep {keep!r} is not known; write all, best, or 'score>=0.5' (in quotes)")
    return None


def run(config: Config, out: Path | None, keep: str) -> list[Row]:
    """Generates on a Ray of its own; returns what is kept, and writes it to `out` if there is one."""
    from raypipe.preflight import preflight_sampling
    from raypipe.sampling import resident_actors

    prompts, demands = preflight_sampling(config, config.data.train_files)
    with resident_actors(config, demands) as actors:
        return generate(config, prompts.prompts, actors, out, keep)


def generate(
    config: Config, prompts: Sequence[Any], actors: Any, out: Path | None, keep: str, number: int = 0
) -> list[Row]:
    """Samples and grades `prompts` (of `prompts.py`) on `actors` (`ResidentActors`); returns what is kept, and writes
    it."""
    from raypipe.sample_files import write_samples_file
    from raypipe.sampling import sample_prompts

    rows = sample_prompts(config, prompts, "train", config.rollout.n, actors, number)
    chosen = select(rows, keep)
    scores = [row["score"] for row in rows if row["grade_status"] == "ok"]
    mean = f", mean score {sum(scores) / len(scores):.4f}" if scores else ""
    print(f"{len(rows)} samples of {len(prompts)} prompts, {len(scores)} graded ok{mean}")
    if out:
        write_samples_file(out, chosen)
        print(f"wrote {len(chosen)} of them to {out} (--keep {keep})")
    return chosen


def select(rows: Sequence[Row], keep: str) -> list[Row]:
    """The rows that `--keep` names, in their order."""
    least = check_keep(keep)
    ok = [row for row in rows if row["grade_status"] == "ok"]
    if least is not None:
        return [row for row in ok if row["score"] >= least]
    if keep == "all":
        return list(rows)
    best: dict[int, Row] = {}
    for row in ok:
        if row["group_id"] not in best or row["score"] > best[row["group_id"]]["score"]:
            best[row["group_id"]] = row
    return list(best.values())


if __name__ == "__main__":
    sys.exit(main())
