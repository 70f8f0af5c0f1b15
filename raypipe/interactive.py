"""The plan on small data: the whole of it, or a stage at a time, for notebooks.

In: a config, and prompts given by hand or taken from data.train_files. Out: pyarrow tables with the columns of rows.py.
Decision: each call is a streaming plan of its own, made where a training run's plans are made, on actors that stay from
call to call; those that a call does not need (an engine, to grade) are not started.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from raypipe import resources
from raypipe.config import Config, grader_actors
from raypipe.config_checks import check_plan
from raypipe.config_file import resolve
from raypipe.engines.vllm import start_engines
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.pipeline import Workers, build_plan
from raypipe.plans import Group, group_blocks
from raypipe.preflight import load_tokenizer
from raypipe.prompt_files import file_rows
from raypipe.prompts import Prompt, load_prompts, prepare_prompts
from raypipe.residents import close, ray_session, sampling_settings
from raypipe.resources import Demand
from raypipe.sample_files import generated_rows, read_samples, to_block
from raypipe.scorer import scorer_names, start_scorers


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

    def prompts(self, prompts: int | Sequence[str | Mapping[str, Any]], n: int = 0) -> pa.Table:
        """Prompts as rows for the engines (PROMPT_COLUMNS), `n` samples of each.

        Args:
            prompts: texts, rows as a file has them (`prompt`, `ground_truth`, ...), or how many of data.train_files.
            n: samples of each; 0: rollout.n.
        """
        n = n or self.config.rollout.n
        groups = [Group(0, i, prompt, "train", n, 0) for i, prompt in enumerate(self._prompts(prompts))]
        return pa.concat_tables(block for group in groups for block in group_blocks(group, n, self.config.run.seed))

    def _prompts(self, prompts: int | Sequence[str | Mapping[str, Any]]) -> Sequence[Prompt]:
        data, tokenizer = self.config.data, load_tokenizer(self.config.model.path)
        if isinstance(prompts, int):
            return load_prompts(data.train_files, data, tokenizer, "").prompts[:prompts]
        rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
        by_hand = dataclasses.replace(data, require_ground_truth=False, overlong="error")
        return prepare_prompts(file_rows(rows), by_hand, tokenizer).prompts

    def generate(self, prompts: pa.Table | int | Sequence[str | Mapping[str, Any]], n: int = 0) -> pa.Table:
        """Samples `prompts` (a table of, or what goes into, `prompts()`): adds GENERATE_COLUMNS."""
        return self._run(["generate"], self._table(prompts, n))

    def grade(self, generated: pa.Table | Sequence[Mapping[str, Any]]) -> pa.Table:
        """Grades `generated`, a table from `generate` or rows with `prompt` and `response`: adds GRADE_COLUMNS."""
        if isinstance(generated, Sequence):
            rows = read_samples(file_rows(generated), self.config.data.columns)
            generated = to_block(generated_rows(rows))
        return self._run(["grade"], generated)

    def score(self, graded: pa.Table) -> pa.Table:
        """Has reference, policy or critic look at `graded`, as the algorithm needs: adds SCORE_COLUMNS."""
        if not self._scorers:
            raise ValueError(
                "this algorithm has no Score stage: it comes with algorithm.kl_coef above 0, adv_estimator=gae or "
                "old_logprobs=scorer"
            )
        return self._run(["score"], graded)

    def run(self, prompts: pa.Table | int | Sequence[str | Mapping[str, Any]], n: int = 0) -> pa.Table:
        """Samples, grades and scores `prompts` in one streaming plan, as a training iteration does."""
        stages = ["generate", "grade", *(["score"] if self._scorers else [])]
        return self._run(stages, self._table(prompts, n))

    def _table(self, prompts: pa.Table | int | Sequence[str | Mapping[str, Any]], n: int) -> pa.Table:
        return self.prompts(prompts, n) if isinstance(prompts, int | Sequence) else prompts

    def _run(self, stages: list[str], table: pa.Table) -> pa.Table:
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
        found = ray.get(plan.to_arrow_refs())
        if workers.dispatcher:
            ray.get_actor(workers.dispatcher).forget.remote(name)
        return pa.concat_tables(found).sort_by([("group_id", "ascending"), ("member", "ascending")])

    # What is resident: names of actors, started on first use.

    @cached_property
    def _demands(self) -> dict[str, Demand]:
        demands = resources.demands(self.config, resources.find_machine())
        self.started.enter_context(ray_session(self.config, sum(demand.count * demand.cpus for demand in demands)))
        return {demand.actor: demand for demand in demands}

    @cached_property
    def _engines(self) -> list[str]:
        assert self._demands
        actors = start_engines(self.config, self.config.run.name)
        self._keep(actors, "ready")
        return [f"{self.config.run.name}/engine-{i}" for i in range(len(actors))]

    @cached_property
    def _dispatcher(self) -> str:
        name, cpus = self.config.run.name, self._demands["grader host"].cpus
        self._keep([start_dispatcher(self.config.grade, grader_actors(self.config), name, cpus)], "start")
        return f"{name}/grade-dispatcher"

    @cached_property
    def _scorers(self) -> dict[str, list[str]]:
        if names := scorer_names(self.config):
            started = start_scorers(self.config, self._demands["scorer"].gpus)
            self._keep([actor for actors in started.values() for actor in actors], "ready")
        return names

    def _keep(self, actors: list[Any], ready: str) -> None:
        """Waits until each has started, and ends it with the pipeline. Raises what kept it from starting."""
        self.started.callback(close, actors)
        try:
            ray.get([getattr(actor, ready).remote() for actor in actors])
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None


def split(table: pa.Table) -> list[pa.Table]:
    """A table of samples as the plan's blocks, one a prompt."""
    groups: dict[int, list[int]] = {}
    for i, group_id in enumerate(table["group_id"].to_pylist()):
        groups.setdefault(group_id, []).append(i)
    return [table.take(rows) for rows in groups.values()]
