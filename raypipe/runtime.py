"""What lives as long as a training run: what plans call (residents.py), the plan server and the learner group.

In: a checked config and its prompts. Out: each iteration's record, as the learner reports it, whatever dies or stands
still in between.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import remove_placement_group

from raypipe.config import Config
from raypipe.learner import learn
from raypipe.placement import for_ray
from raypipe.plans import start_plan_server
from raypipe.preflight import Inputs
from raypipe.reserve import start_reserve
from raypipe.residents import HURRIED_CLOSE_S, ResidentActors, close
from raypipe.resources import Demand
from raypipe.scorer import scorer_names, start_scorers
from raypipe.stopping import RunStopped, Signals, Stalled
from raypipe.watchdog import Watch, ask, describe

POLL_S = 0.5


class LearnerRestarted(Exception):
    """The learner group was lost and has started again, from `first` trained iterations."""

    def __init__(self, first: int, trouble: str):
        super().__init__(trouble or "a rank was lost without a word")
        self.first = first


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
