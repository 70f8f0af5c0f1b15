"""The command `python -m raypipe.evaluate --config x.yaml [--model DIR] [--out FOLDER] key=value ...`.

In: a run's config: its model, data.val_files, graders, and the sampling settings of its `eval` section. Out: a folder
with `summary.json` (avg@k, pass@k and maj@k of each data source, with 95% intervals) and `samples.parquet` (every
sample with its grades). Decision: it is the training run's own plan, engines and graders without a learner, so avg@n is
measured just as training measures reward/heldout_mean.

maj@k votes over answers. A grader that names its answer (a value `answer` or `extracted` beside the score) says what
each sample answered; without one the whole response is the answer, ignoring case and white space.
"""

import argparse
import dataclasses
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.config import Config
from raypipe.config_checks import check_plan
from raypipe.config_file import load_config

Row = dict[str, Any]

ANSWERS = ("answer", "extracted")
EVERYTHING = "all"  # the name of all data sources together, where there are several


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--model", help="model folder, e.g. runs/demo/checkpoints/step_30/hf (default: model.path)")
    parser.add_argument("--out", help="folder for the results (default: run.dir/run.name.eval)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, e.g. eval.n=8 eval.temperature=0.6"
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, with_model(options.overrides, options.model), check_evaluation)
        out = Path(options.out or f"{config.run.dir}/{config.run.name}.eval")
        if (out / "summary.json").exists():
            raise ValueError(f"--out {out} holds an evaluation; name another folder")
        run(config, out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def with_model(overrides: list[str], model: str | None) -> list[str]:
    """`--model`, which is relative to the current folder, as a setting."""
    return overrides if model is None else [*overrides, f"model.path={json.dumps(str(Path(model).resolve()))}"]


def check_evaluation(config: Config) -> None:
    check_plan(config)
    if not config.data.val_files:
        raise ValueError("data.val_files is empty; name the files to evaluate on, e.g. data.val_files=[test.parquet]")


def run(config: Config, out: Path) -> dict[str, Any]:
    """Evaluates on a Ray of its own and writes the results to `out`; returns the summary."""
    from raypipe.preflight import preflight_sampling
    from raypipe.sampling import resident_actors

    prompts, demands = preflight_sampling(config, config.data.val_files)
    with resident_actors(config, demands) as actors:
        return evaluate(config, prompts.prompts, actors, out)


def evaluate(config: Config, prompts: Sequence[Any], actors: Any, out: Path, number: int = 0) -> dict[str, Any]:
    """Samples and grades `prompts` (of `prompts.py`) on `actors` (`ResidentActors`), writes `out`, prints a table."""
    from raypipe.sample_files import write_samples_file
    from raypipe.sampling import sample_prompts

    rows = sample_prompts(config, prompts, "heldout", config.eval.n, actors, number)
    summary = summarize(config, rows)
    out.mkdir(parents=True, exist_ok=True)
    write_samples_file(out / "samples.parquet", rows)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(summary)
    print(f"results: {out}")
    return summary


def summarize(config: Config, rows: Sequence[Row]) -> dict[str, Any]:
    """What summary.json holds: `data_sources` -> name -> measures (see `estimates.measures`) and counts."""
    from raypipe.config import heldout_response_length

    sources = sorted({row["data_source"] for row in rows})
    parts = {source: [row for row in rows if row["data_source"] == source] for source in sources}
    if len(sources) > 1:
        parts[EVERYTHING] = list(rows)
    return {
        "model": config.model.path,
        "files": config.data.val_files,
        "n": config.eval.n,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "max_response_length": heldout_response_length(config),
        "pass_score": config.eval.pass_score,
        "seed": config.run.seed,
        "data_sources": {name: summarize_source(config, part) for name, part in parts.items()},
    }


def summarize_source(config: Config, rows: Sequence[Row]) -> dict[str, Any]:
    from raypipe.estimates import PromptSamples, measures

    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    prompts = []
    for group in groups.values():
        graded = [row for row in group if row["grade_status"] == "ok"]
        scores = [row["score"] for row in graded]
        passes = [score >= config.eval.pass_score for score in scores]
        prompts.append(PromptSamples(scores, passes, answers(graded)))
    found = measures(prompts, config.eval.n, config.run.seed)
    return {
        **{name: dataclasses.asdict(of) for name, of in found.items()},
        "prompts": len(groups),
        "samples": len(rows),
        "statuses": dict(Counter(row["grade_status"] for row in rows)),
        "not_generated": sum(row["finish_reason"] == "failed" for row in rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows),
        "response_length_mean": sum(row["response_length"] for row in rows) / len(rows),
    }


def answers(rows: Sequence[Row]) -> list[str | None]:
    """What each sample of one prompt answered (see above); None for one without an answer where others have one."""
    named = [named_answer(row["grades"]) for row in rows]
    if any(answer is not None for answer in named):
        return named
    return [" ".join(unicodedata.normalize("NFC", row["response_text"]).casefold().split()) for row in rows]


def named_answer(grades: str) -> str | None:
    for entry in json.loads(grades):
        for name in ANSWERS:
            if entry["values"].get(name) is not None:
                return str(entry["values"][name])
    return None


def show(summary: dict[str, Any]) -> None:
    """Prints a row a data source and measure."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from raypipe.samples import terminal_safe

    screen = Console(highlight=False)
    table = Table("data source", "measure", "value", "95% interval", "prompts")
    for source, found in summary["data_sources"].items():
        for name, of in found.items():
            if isinstance(of, dict) and "low" in of:
                interval = f"{of['low']:.4f} to {of['high']:.4f}"
                table.add_row(Text(terminal_safe(source)), name, f"{of['value']:.4f}", interval, str(of["prompts"]))
    screen.print(table)
    statuses: Counter[str] = Counter()
    for source, found in summary["data_sources"].items():
        if source != EVERYTHING or len(summary["data_sources"]) == 1:
            statuses.update(found["statuses"])
    if statuses.total() > statuses["ok"]:
        screen.print("not every sample was graded ok: " + ", ".join(f"{n} {name}" for name, n in statuses.items()))


if __name__ == "__main__":
    sys.exit(main())
