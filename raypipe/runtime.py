"""What lives as long as a run: Ray, the engines, the grade dispatcher, the plan server and the learner group.

In: a checked config and its prompts. Out: each iteration's record, as the learner reports it. Everything heavy is
started once, in parallel, and ended together; plans come and go in between.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import remove_placement_group

from raypipe.config import Config, engine_count, grader_actors, heldout_response_length
from raypipe.engines.vllm import start_engines
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.learner import learn
from raypipe.pipeline import Workers
from raypipe.placement import for_ray
from raypipe.plans import start_plan_server
from raypipe.preflight import Inputs
from raypipe.reserve import start_reserve
from raypipe.resources import Demand
from raypipe.scorer import scorer_names, start_scorers
from raypipe.stopping import RunStopped, Signals, Stalled
from raypipe.watchdog import Watch, ask, describe

POLL_S = 0.5
# Seconds that resident actors have to end what they started, as a rule and after a signal.
CLOSE_S, HURRIED_CLOSE_S = 20.0, 4.0


class LearnerRestarted(Exception):
    """The learner group was lost and has started again, from `first` trained iterations."""

    def __init__(self, first: int, trouble: str):
        super().__init__(trouble or "a rank was lost without a word")
        self.first = first


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


@contextlib.contextmanager
def ray_session(config: Config, cpus: float) -> Iterator[None]:
    """Ray while it is open: the one that this process has already (a notebook's), else one of its own."""
    own = not ray.is_initialized()
    if own:
        start_ray(config, cpus)
    try:
        yield
    finally:
        if own:
            ray.shutdown()


class ResidentActors:
    """What the stages of every plan call, engines and grade dispatcher, as a context manager that leaves nothing
    running. This is all that a plan without a learner needs.

    Args:
        config: the run's configuration.
        demands: who asks for which CPUs and GPUs.

    Attributes:
        close_limit_s: seconds that the actors have to end what they started.
    """

    def __init__(self, config: Config, demands: Sequence[Demand]):
        self.config, self.close_limit_s = config, CLOSE_S
        self.grader_cpus = next(demand.cpus for demand in demands if demand.actor == "grader host")

    def __enter__(self) -> "ResidentActors":
        config, name = self.config, self.config.run.name
        self.engines = start_engines(config, name)
        self.dispatcher = start_dispatcher(config.grade, grader_actors(config), name, self.grader_cpus)
        self.workers = Workers(
            engines=[f"{name}/engine-{i}" for i in range(engine_count(config))],
            dispatcher=f"{name}/grade-dispatcher",
            grade_actors=grader_actors(config),
            sampling=sampling_settings(config),
            stages=config.pipeline.stages,
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
        close([*self.engines, self.dispatcher], self.close_limit_s)


def close(actors: Iterable[Any], limit_s: float = CLOSE_S) -> None:
    """Lets actors end what they started; one that does not answer in time is left to Ray, which kills it."""
    closing: list[Any] = [actor.close.remote() for actor in actors]
    deadline = time.monotonic() + limit_s
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
        signals: whether the run was asked to end.
        tell: called with warnings.
    """

    def __init__(self, config: Config, inputs: Inputs, signals: Signals, tell: Callable[[str], None]):
        self.config, self.inputs, self.signals, self.tell = config, inputs, signals, tell
        self.actors = ResidentActors(config, inputs.demands)
        self.failure: BaseException | None = None
        self.learner: threading.Thread | None = None
        self.attempt = -1
        self.ending = False
        self.watch = Watch(min(config.watchdog.stall_s, config.watchdog.fail_s))

    def __enter__(self) -> "Runtime":
        config, inputs = self.config, self.inputs
        # They load their weights while graders are built.
        scorer = next((demand for demand in inputs.demands if demand.actor == "scorer"), None)
        self.scorers = start_scorers(config, scorer.gpus if scorer else 0.0)
        self.actors.__enter__()
        self.reserve, reserve = start_reserve(config)
        workers = dataclasses.replace(self.actors.workers, scorers=scorer_names(config), reserve=reserve)
        heldout = inputs.heldout.prompts if inputs.heldout else []
        self.server = start_plan_server(config, inputs.train.prompts, heldout, workers)
        return self

    @property
    def models(self) -> dict[str, Any]:
        """The actors that hold a model, by name."""
        engines = {f"engine-{i}": engine for i, engine in enumerate(self.actors.engines)}
        scorers = {f"scorer-{role}-{i}": s for role, found in self.scorers.items() for i, s in enumerate(found)}
        return engines | scorers

    def start_learner(self, folder: Path) -> None:
        """Starts the learner group, which trains until the last iteration, beside this thread."""
        if self.config.pipeline.colocate:  # they take their memory before ranks take theirs
            self.actors.wait_for_engines()
        self.learner = threading.Thread(target=self._fit, args=(folder,), daemon=True, name="learner")
        self.learner.start()
        self._wait_for_models()

    def _trainer(self, folder: Path, start: int) -> TorchTrainer:
        rank = next(demand for demand in self.inputs.demands if demand.actor == "learner rank")
        return TorchTrainer(
            learn,
            train_loop_config={
                "config": self.config,
                "folder": str(folder),
                "server": self.server,
                "engines": self.actors.engines,
                "scorers": self.scorers,
            },  # fmt: skip
            scaling_config=learner_scaling(rank),
            run_config=RunConfig(
                name=f"{self.config.run.name}-{start}",
                storage_path=str(folder / "ray_train"),
                # `wait_for` counts the attempts: what matters is how many in a row were in vain.
                failure_config=FailureConfig(-1 if self.config.train.max_restarts else 0),
            ),
            torch_config=TorchConfig(timeout_s=int(self.config.watchdog.fail_s)),
        )

    def _wait_for_models(self) -> None:
        """One that cannot start (a model that vLLM does not know) ends the run here, with its reason."""
        waiting = {actor.ready.remote(): name for name, actor in self.models.items()}
        start = time.monotonic()
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=POLL_S)
            for call in done:
                ray.get(call)
                del waiting[call]
            self._look_for_signals()
            if self.watch.is_due():
                waited_s = time.monotonic() - start
                self.tell(f"{', '.join(waiting.values())}: not up yet, {waited_s:.0f} s after the start")

    def _fit(self, folder: Path) -> None:
        for start in itertools.count():
            try:
                self._trainer(folder, start).fit()
                return
            except ray.exceptions.RayActorError as error:  # Ray Train's controller has died, and its ranks with it
                if self.ending or not self.config.train.max_restarts:
                    self.failure = error
                    return
                # What the group held is free again only when told so: Ray Train's own cleaner needs the dashboard.
                place, _ = ray.get(self.server.group.remote())
                if place:
                    remove_placement_group(place)
            except BaseException as error:  # raised in the driver's thread by `wait_for`
                self.failure = error
                return

    def wait_for(self, iteration: int, progress: Callable[[dict[str, int]], None]) -> list[dict[str, Any]]:
        """The records of all ranks of an iteration; calls `progress` now and then with what is done so far.

        Raises LearnerRestarted, RunStopped after a signal, Stalled, and RuntimeError from what ended the learner.
        """
        assert self.learner is not None
        most = self.config.train.max_restarts
        while True:
            ended = not self.learner.is_alive()
            told = ray.get(self.server.told.remote(iteration, self.attempt, 0.0 if ended else POLL_S))
            if told.records is not None:
                return told.records
            if told.fruitless > most:
                raise RuntimeError(
                    f"the learner ended {told.fruitless} times in a row before it finished iteration {iteration}, over "
                    f"train.max_restarts={most}; the last time: {told.trouble or 'a rank was lost without a word'}"
                )
            if told.attempt != self.attempt and told.first is not None:
                is_first, self.attempt = self.attempt < 0, told.attempt
                if not is_first or told.first != iteration:
                    raise LearnerRestarted(told.first, told.trouble)
            if ended:
                raise RuntimeError(f"the learner ended in iteration {iteration}") from self.failure
            counts = self.counts()
            progress(counts)
            self._look_for_signals()
            self._look_for_stall((iteration, told.attempt, counts), told.pulses)

    def _look_for_signals(self) -> None:
        if received := self.signals.received:
            raise RunStopped(f"stopped by {received.name}", 128 + received)

    def _look_for_stall(self, done: tuple[Any, ...], pulses: dict[int, dict[str, Any]]) -> None:
        """Tells of a stall, ends what does not answer, so that Ray starts it again, and raises Stalled after fail_s."""
        limits = self.config.watchdog
        moves = {rank: (pulse["phase"], pulse["since"], pulse["work"]) for rank, pulse in pulses.items()}
        still_s = self.watch.still((*done, moves))
        if not self.watch.is_due():
            return
        ray.get(self.server.give.remote(f"stacks {time.time()}"))
        residents = {**self.models, "grading": self.actors.dispatcher}
        said, silent = ask(residents)
        for name in silent:
            ray.kill(residents[name], no_restart=False)
        self.tell(f"nothing has moved for {still_s:.0f} s (watchdog.stall_s={limits.stall_s:g}):")
        for line in describe(said, silent, ray.get(self.server.pulses.remote())):
            self.tell(f"  {line}")
        if still_s >= limits.fail_s:
            raise Stalled(
                f"nothing has moved for {still_s:.0f} s, over watchdog.fail_s={limits.fail_s:g}; the log says where"
            )

    def stop(self, iteration: int) -> tuple[bool, list[dict[str, Any]] | None]:
        """Has the learner save its state and end, within watchdog.stop_s.

        Returns whether it did, and the records of `iteration` if that was finished for it.
        """
        if self.learner is None:
            return False, None
        ray.get(self.server.give.remote("stop"))
        self.learner.join(self.config.watchdog.stop_s)
        return not self.learner.is_alive(), ray.get(self.server.told.remote(iteration, self.attempt, 0.0)).records

    def counts(self) -> dict[str, int]:
        return self.actors.counts()

    def finish(self) -> None:
        """Waits until the learner has ended by itself, after the last iteration."""
        assert self.learner is not None
        self.learner.join()
        if self.failure:
            raise RuntimeError("the learner failed after the last iteration") from self.failure

    def _end_learner(self) -> None:
        """Ends a learner that still runs: a thread that waits in Ray while Ray is shut down crashes the process."""
        self.ending = True
        if self.learner is None or not self.learner.is_alive():
            return
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            _, controller = ray.get(self.server.group.remote(), timeout=5)
            if controller:
                ray.kill(controller)
        self.learner.join(5)

    def __exit__(self, *_: object) -> None:
        self._end_learner()
        if self.signals.received:  # whoever sent it will not wait for long
            self.actors.close_limit_s = HURRIED_CLOSE_S
        close((scorer for role in self.scorers.values() for scorer in role), self.actors.close_limit_s)
        self.actors.__exit__()
