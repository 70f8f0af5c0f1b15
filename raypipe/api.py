"""The commands as functions, for notebooks and scripts; `raypipe.Pipeline` is the plan a stage at a time.

In: a config file with overrides, or a `Config`. Out: what the command writes, as values. Decision: nothing here does
any of the work; the commands and these functions call the same code. Ray is started for as long as it is needed, or
the one that the process has already is used, which keeps no actor of theirs.

    from raypipe import api

    folder = api.train("configs/demo.yaml", ["run.name=mine"])
    summary = api.evaluate("configs/demo.yaml", ["eval.n=4", "eval.temperature=0.6"])
    samples = api.generate("configs/demo.yaml", ["rollout.n=16"], keep="best")
    graded = api.grade("samples.parquet", "graders.math:MathGrader")
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.config import Config, GraderConfig
from raypipe.config_file import resolve

if TYPE_CHECKING:
    from raypipe.run_folder import RunFolder

Row = dict[str, Any]


def train(config: Config | str | Path, overrides: Sequence[str] = ()) -> "RunFolder":
    """Trains as `python -m raypipe.train` does; returns the run's folder (`metrics`, `read_metrics()`, `checkpoints`).

    Args:
        config: a YAML file, or a `Config`.
        overrides: `key=value` settings that replace the file's.

    Raises:
        ValueError: a mistake in config, data or graders, named by its key.
    """
    from raypipe.preflight import preflight
    from raypipe.run_folder import RunFolder
    from raypipe.train import run

    checked = resolve(config, overrides)
    return RunFolder(run(checked, preflight(checked)), resumed=False)


def evaluate(
    config: Config | str | Path, overrides: Sequence[str] = (), out: str | Path | None = None
) -> dict[str, Any]:
    """Evaluates `data.val_files` as `python -m raypipe.evaluate` does; returns what its summary.json holds.

    Args:
        config: a YAML file, or a `Config`.
        overrides: `key=value` settings, e.g. `model.path=runs/demo/checkpoints/step_30/hf`.
        out: folder for summary.json and samples.parquet; None: nothing is kept.
    """
    from raypipe import evaluate as command

    checked = resolve(config, overrides, command.check_evaluation)
    if out is not None:
        return command.run(checked, Path(out))
    with tempfile.TemporaryDirectory() as folder:
        return command.run(checked, Path(folder))


def generate(
    config: Config | str | Path, overrides: Sequence[str] = (), out: str | Path | None = None, keep: str = "all"
) -> list[Row]:
    """Samples and grades `data.train_files` as `python -m raypipe.generate` does; returns the rows that are kept.

    Args:
        config: a YAML file, or a `Config`.
        overrides: `key=value` settings, e.g. `rollout.n=16`.
        out: .parquet or .jsonl file to write; None: none.
        keep: all, best (of each prompt) or score>=x.
    """
    from raypipe import generate as command

    command.check_keep(keep)
    if out is not None:
        command.check_out(Path(out))
    return command.run(resolve(config, overrides, command.check_generation), None if out is None else Path(out), keep)


def grade(
    data: str | Sequence[str] | Sequence[Mapping[str, Any]],
    grader: str | GraderConfig,
    *,
    columns: Mapping[str, str] | None = None,
    response: str = "",
    group_by: str = "",
    processes: int = 0,
    out: str | Path | None = None,
) -> list[Row]:
    """Grades responses as `python -m raypipe.grade` does; returns their rows with GRADE_COLUMNS, in order.

    Args:
        data: parquet or JSONL files, or rows, with `prompt`, `response` and, for graders that need it, `ground_truth`.
        grader: `package.module:Name`, `file.py:name`, or an entry of grade.graders.
        columns: as data.columns.
        response: column of the response, where it has another name.
        group_by: column with the same value for samples of one prompt.
        processes: child processes; 0: one a core.
        out: .parquet or .jsonl file to write; None: none.
    """
    from raypipe.grade import grade_rows, grading_config
    from raypipe.prompt_files import file_rows, read_rows
    from raypipe.sample_files import generated_rows, read_samples, write_samples_file

    entry = grader if isinstance(grader, GraderConfig) else GraderConfig(path=grader)
    config = grading_config(entry, processes or len(os.sched_getaffinity(0)))
    if isinstance(data, str):
        data = [data]
    files = [name for name in data if isinstance(name, str)]
    rows = read_rows(files, "") if files else file_rows([row for row in data if not isinstance(row, str)])
    graded = grade_rows(config, generated_rows(read_samples(rows, columns or {}, response, group_by)))
    if out is not None:
        write_samples_file(Path(out), graded)
    return graded
