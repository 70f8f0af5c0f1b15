"""The commands as functions, and the plan a stage at a time, for notebooks and scripts.

In: a config file with overrides, or a `Config`. Out: what the command writes, as values. Decision: nothing here does
any of the work; the commands and these functions call the same code. Ray is started for as long as it is needed, or
the one that the process has already is used.

    from raypipe import api

    folder = api.train("configs/demo.yaml", ["run.name=mine"])
    summary = api.evaluate("configs/demo.yaml", ["eval.n=4", "eval.temperature=0.6"])
    samples = api.generate("configs/demo.yaml", ["rollout.n=16"], keep="best")
    graded = api.grade("samples.parquet", "graders.math:MathGrader")
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.config import Config, GraderConfig
from raypipe.config_checks import check, check_across, check_plan
from raypipe.config_file import load_config

if TYPE_CHECKING:
    import pyarrow as pa

    from raypipe.prompts import Prompt
    from raypipe.resources import Demand
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

    checked = resolve(config, overrides, check_across)
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
    from raypipe.prompt_files import read_rows
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


def resolve(config: Config | str | Path, overrides: Sequence[str], across: Callable[[Config], None]) -> Config:
    """A checked `Config`. One that was made in Python is taken as it is: `dataclasses.replace` changes it."""
    if not isinstance(config, Config):
        return load_config(config, list(overrides), across)
    if overrides:
        raise ValueError(f"{overrides[0]!r}: overrides go with a file; change a Config with dataclasses.replace")
    check(config)
    across(config)
    return config


def file_rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Rows given in Python as `prompt_files.read_rows` gives those of files."""
    from raypipe.prompt_files import FileRow

    return [FileRow(f"row {i}", f"row:{i}", dict(row)) for i, row in enumerate(rows)]


class Pipeline:
    """The plan on small data: the whole of it, or a stage at a time, on engines and graders that stay.

        with raypipe.Pipeline("configs/demo.yaml") as pipeline:
            generated = pipeline.generate(["What is 6*7?"])     # a pyarrow.Table; .to_pylist(), .to_pandas()
            graded = pipeline.grade(generated)
            graded.column("score")

    Each stage is a streaming plan of its own over the table's samples, with the stages of pipeline.stages that follow
    it. Engines, graders and scorers start when they are first needed and end with `close()` or the `with` block.

    Args:
        config: a YAML file, or a `Config`.
        overrides: `key=value` settings that replace the file's.
    """

    def __init__(self, config: Config | str | Path, overrides: Sequence[str] = ()):
        self.config = resolve(config, overrides, check_plan)
        self.started = contextlib.ExitStack()
        self.plans = 0

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that was started."""
        self.started.close()
        for name in ("_demands", "_engines", "_dispatcher", "_scorers"):
            self.__dict__.pop(name, None)  # they start again when they are needed

    def prompts(self, prompts: int | Sequence[str | Mapping[str, Any]], n: int = 0) -> "pa.Table":
        """Prompts as rows for the engines (PROMPT_COLUMNS), `n` samples of each.

        Args:
            prompts: texts, rows as a file has them (`prompt`, `ground_truth`, ...), or how many of data.train_files.
            n: samples of each; 0: rollout.n.
        """
        import pyarrow as pa

        from raypipe.plans import Group, group_blocks

        n = n or self.config.rollout.n
        groups = [Group(0, i, prompt, "train", n, 0) for i, prompt in enumerate(self._prompts(prompts))]
        return pa.concat_tables(block for group in groups for block in group_blocks(group, n, self.config.run.seed))

    def _prompts(self, prompts: int | Sequence[str | Mapping[str, Any]]) -> "Sequence[Prompt]":
        from raypipe.preflight import load_tokenizer
        from raypipe.prompts import load_prompts, prepare_prompts

        data, tokenizer = self.config.data, load_tokenizer(self.config.model.path)
        if isinstance(prompts, int):
            return load_prompts(data.train_files, data, tokenizer, "").prompts[:prompts]
        rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
        by_hand = dataclasses.replace(data, require_ground_truth=False, overlong="error")
        return prepare_prompts(file_rows(rows), by_hand, tokenizer).prompts

    def generate(self, prompts: "pa.Table | int | Sequence[str | Mapping[str, Any]]", n: int = 0) -> "pa.Table":
        """Samples `prompts` (a table of, or what goes into, `prompts()`): adds GENERATE_COLUMNS."""
        return self._run(["generate"], self._table(prompts, n))

    def grade(self, generated: "pa.Table | Sequence[Mapping[str, Any]]") -> "pa.Table":
        """Grades `generated`, a table from `generate` or rows with `prompt` and `response`: adds GRADE_COLUMNS."""
        from raypipe.sample_files import generated_rows, read_samples, to_block

        if isinstance(generated, Sequence):
            rows = read_samples(file_rows(generated), self.config.data.columns)
            generated = to_block(generated_rows(rows))
        return self._run(["grade"], generated)

    def score(self, graded: "pa.Table") -> "pa.Table":
        """Has reference, policy or critic look at `graded`, as the algorithm needs: adds SCORE_COLUMNS."""
        if not self._scorers:
            raise ValueError(
                "this algorithm has no Score stage: it comes with algorithm.kl_coef above 0, adv_estimator=gae or "
                "old_logprobs=scorer"
            )
        return self._run(["score"], graded)

    def run(self, prompts: "pa.Table | int | Sequence[str | Mapping[str, Any]]", n: int = 0) -> "pa.Table":
        """Samples, grades and scores `prompts` in one streaming plan, as a training iteration does."""
        stages = ["generate", "grade", *(["score"] if self._scorers else [])]
        return self._run(stages, self._table(prompts, n))

    def _table(self, prompts: "pa.Table | int | Sequence[str | Mapping[str, Any]]", n: int) -> "pa.Table":
        return self.prompts(prompts, n) if isinstance(prompts, int | Sequence) else prompts

    def _run(self, stages: list[str], table: "pa.Table") -> "pa.Table":
        import logging

        import pyarrow as pa
        import ray

        from raypipe.config import grader_actors
        from raypipe.pipeline import Workers, build_plan
        from raypipe.runtime import sampling_settings

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # the executor runs in this process
        self.plans += 1
        name = f"{self.config.run.name}.{'-'.join(stages)}.{self.plans}"
        workers = Workers(
            engines=self._engines if "generate" in stages else [],
            dispatcher=self._dispatcher if "grade" in stages else "",
            grade_actors=grader_actors(self.config),
            sampling=sampling_settings(self.config),
            scorers=self._scorers if "score" in stages else {},
            stages=self.config.pipeline.stages,
        )
        plan = build_plan(name, split(table), workers, stages)
        found = list(plan.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
        if workers.dispatcher:
            ray.get_actor(workers.dispatcher).forget.remote(name)
        return pa.concat_tables(found).sort_by([("group_id", "ascending"), ("member", "ascending")])

    # What is resident: names of actors, started on first use.

    @cached_property
    def _demands(self) -> "dict[str, Demand]":
        from raypipe import resources
        from raypipe.runtime import ray_session

        demands = resources.demands(self.config, resources.find_machine())
        self.started.enter_context(ray_session(self.config, sum(demand.count * demand.cpus for demand in demands)))
        return {demand.actor: demand for demand in demands}

    @cached_property
    def _engines(self) -> list[str]:
        from raypipe.engines.vllm import start_engines

        assert self._demands
        actors = start_engines(self.config, self.config.run.name)
        self._keep(actors, "ready")
        return [f"{self.config.run.name}/engine-{i}" for i in range(len(actors))]

    @cached_property
    def _dispatcher(self) -> str:
        from raypipe.config import grader_actors
        from raypipe.grading.dispatcher import start_dispatcher

        name, cpus = self.config.run.name, self._demands["grader host"].cpus
        self._keep([start_dispatcher(self.config.grade, grader_actors(self.config), name, cpus)], "start")
        return f"{name}/grade-dispatcher"

    @cached_property
    def _scorers(self) -> dict[str, list[str]]:
        from raypipe.scorer import scorer_names, start_scorers

        if names := scorer_names(self.config):
            started = start_scorers(self.config, self._demands["scorer"].gpus)
            self._keep([actor for actors in started.values() for actor in actors], "ready")
        return names

    def _keep(self, actors: list[Any], ready: str) -> None:
        """Waits until each has started, and ends it with the pipeline. Raises what kept it from starting."""
        import ray

        from raypipe.runtime import close

        def end() -> None:
            close(actors)
            for actor in actors:
                ray.kill(actor)

        self.started.callback(end)
        try:
            ray.get([getattr(actor, ready).remote() for actor in actors])
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None


def split(table: "pa.Table") -> "list[pa.Table]":
    """A table of samples as the plan's blocks, one a prompt."""
    groups: dict[int, list[int]] = {}
    for i, group_id in enumerate(table["group_id"].to_pylist()):
        groups.setdefault(group_id, []).append(i)
    return [table.take(rows) for rows in groups.values()]
