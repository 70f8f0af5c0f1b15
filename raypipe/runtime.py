"""What lives as long as a run: Ray, the engines, the grade dispatcher, the plan server and the learner group.

In: a checked config and its prompts. Out: each iteration's record, as the learner reports it. Everything heavy is
started once, in parallel, and ended together; plans come and go in between.
"""

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypipe.config import Config, grader_actors, heldout_response_length
from raypipe.engines.vllm import start_engines
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.learner import learn
from raypipe.pipeline import Workers
from raypipe.placement import for_ray
from raypipe.plans import PlanServer
from raypipe.preflight import Inputs
from raypipe.reserve import start_reserve
from raypipe.resources import Demand
from raypipe.scorer import scorer_names, start_scorers

POLL_S = 0.5


def start_ray(config: Config, cpus: float) -> None:
    """Connects to the cluster of `RAY_ADDRESS`, or starts Ray on this machine, its dashboard bound to loopback and with
    token authentication, which is Ray's default.

    Here CPUs are a count that Ray schedules by, not a fence, so at least the `cpus` that the run asks for are declared.
    """
    local: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # A run has more processes than cores, most of them idle; Ray would warn of each few.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
        local = {
            "address": "local",  # not a cluster that happens to run here
            "num_cpus": max(len(os.sched_getaffinity(0)), math.ceil(cpus)),
            "dashboard_host": "127.0.0.1",
            "include_dashboard": config.log.dashboard,
        }
    # Graders may be known by the current folder alone.
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(
        ignore_reinit_error=True, namespace=f"raypipe/{config.run.name}", runtime_env=environment,
        logging_level=logging.ERROR, log_to_driver=config.log.workers, **local,
    )  # fmt: skip


class ResidentActors:
    """What the stages of every plan call, engines and grade dispatcher, as a context manager that leaves nothing
    running. This is all that a plan without a learner needs.

    Args:
        config: the run's configuration.
        demands: who asks for which CPUs and GPUs.
    """

    def __init__(self, config: Config, demands: Sequence[Demand]):
        self.config = config
        self.grader_cpus = next(demand.cpus for demand in demands if demand.actor == "grader host")

    def __enter__(self) -> "ResidentActors":
        config, name = self.config, self.config.run.name
        self.engines = start_engines(config, name)
        self.dispatcher = start_dispatcher(config.grade, grader_actors(config), name, self.grader_cpus)
        self.workers = Workers(
            engines=[f"{name}/engine-{i}" for i in range(config.engine.count)],
            dispatcher=f"{name}/grade-dispatcher",
            grade_actors=grader_actors(config),
            sampling=sampling_settings(config),
        )
        try:
            # A grader whose constructor fails ends the run here, before any weight is loaded.
            ray.get(self.dispatcher.start.remote())
        except ray.exceptions.RayTaskError as error:
            self.__exit__()
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        return self

    def wait_for_engines(self) -> None:
        """An engine that cannot start (a model that vLLM does not know) ends the run here, with its reason."""
        ray.get([engine.ready.remote() for engine in self.engines])

    def counts(self) -> dict[str, int]:
        """Samples generated (those that reached grading) and graded since the start of the run, of all purposes."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            stats: Any = ray.get(self.dispatcher.stats.remote(), timeout=5)
            return {"generated": stats["received"], "graded": stats["graded"]}
        return {}

    def __exit__(self, *_: object) -> None:
        close([*self.engines, self.dispatcher])


def close(actors: Iterable[Any]) -> None:
    """Lets actors end what they started; one that does not answer is left to Ray."""
    closing: list[Any] = [actor.close.remote() for actor in actors]
    deadline = time.monotonic() + 20
    for call in closing:
        try:
            ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError):
            logging.getLogger(__name__).debug("an actor did not close: %s", traceback.format_exc())


def sampling_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Sampling settings by the row's purpose (see `Generate`)."""
    rollout, heldout = config.rollout, config.eval
    return {
        "train": {
            "max_tokens": rollout.max_response_length,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "stop": rollout.stop,
        },
        "heldout": {
            "max_tokens": heldout_response_length(config),
            "temperature": heldout.temperature,
            "top_p": heldout.top_p,
            "stop": rollout.stop,
        },
    }


def learner_scaling(rank: Demand) -> ScalingConfig:
    """Ray Train's form of what the learner's ranks ask for."""
    resources = {"CPU": rank.cpus, **({"GPU": rank.gpus} if rank.gpus else {})}
    scaling: Any = ScalingConfig  # type checkers see that of Ray Train 1, which knew no labels
    return scaling(
        num_workers=rank.count, use_gpu=rank.gpus > 0, resources_per_worker=resources,
        label_selector=for_ray(rank.labels) or None,
    )  # fmt: skip


class Runtime:
    """The resident actors of a training run, as a context manager that leaves nothing running.

    Args:
        config: the run's configuration.
        inputs: prompts and the resource plan from `preflight`.
    """

    def __init__(self, config: Config, inputs: Inputs):
        self.config, self.inputs = config, inputs
        self.actors = ResidentActors(config, inputs.demands)
        self.failure: BaseException | None = None
        self.learner: threading.Thread | None = None

    def __enter__(self) -> "Runtime":
        config, inputs = self.config, self.inputs
        # They load their weights while graders are built.
        scorer = next((demand for demand in inputs.demands if demand.actor == "scorer"), None)
        self.scorers = start_scorers(config, scorer.gpus if scorer else 0.0)
        self.actors.__enter__()
        self.reserve, reserve = start_reserve(config)
        workers = dataclasses.replace(self.actors.workers, scorers=scorer_names(config), reserve=reserve)
        heldout = inputs.heldout.prompts if inputs.heldout else []
        self.server: Any = (
            ray.remote(PlanServer)
            .options(name=f"{config.run.name}/plans", num_cpus=0, max_concurrency=4 * config.train.ranks + 8)
            .remote(config, inputs.train.prompts, heldout, workers)
        )
        return self

    @property
    def residents(self) -> list[Any]:
        """The actors that hold a model."""
        return [*self.actors.engines, *(scorer for role in self.scorers.values() for scorer in role)]

    def start_learner(self, folder: Path) -> None:
        """Starts the learner group, which trains until the last iteration, beside this thread."""
        rank = next(demand for demand in self.inputs.demands if demand.actor == "learner rank")
        trainer = TorchTrainer(
            learn,
            train_loop_config={
                "config": self.config,
                "folder": str(folder),
                "attempt": 0,
                "server": self.server,
                "engines": self.actors.engines,
                "scorers": self.scorers,
            },  # fmt: skip
            scaling_config=learner_scaling(rank),
            run_config=RunConfig(
                name=self.config.run.name, storage_path=str(folder / "ray_train"), failure_config=FailureConfig(0)
            ),
        )
        self.learner = threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="learner")
        self.learner.start()
        # An engine or scorer that cannot start (a model that vLLM does not know) ends the run here, with its reason.
        ray.get([actor.ready.remote() for actor in self.residents])

    def _fit(self, trainer: TorchTrainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # raised in the driver's thread by `wait_for`
            self.failure = error

    def wait_for(self, iteration: int, progress: Callable[[dict[str, int]], None]) -> list[dict[str, Any]]:
        """The records of all ranks of an iteration; calls `progress` now and then with what is done so far.

        Raises what ended the learner, if it ended.
        """
        assert self.learner is not None
        while True:
            ended = not self.learner.is_alive()
            records = ray.get(self.server.take_reports.remote(iteration, 0.0 if ended else POLL_S))
            if records is not None:
                return records
            if ended:
                raise RuntimeError(f"the learner ended in iteration {iteration}") from self.failure
            progress(self.counts())

    def counts(self) -> dict[str, int]:
        return self.actors.counts()

    def finish(self) -> None:
        """Waits until the learner has ended by itself, after the last iteration."""
        assert self.learner is not None
        self.learner.join()
        if self.failure:
            raise RuntimeError("the learner failed after the last iteration") from self.failure

    def __exit__(self, *_: object) -> None:
        close(scorer for role in self.scorers.values() for scorer in role)
        self.actors.__exit__()
