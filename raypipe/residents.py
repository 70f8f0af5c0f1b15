"""What plans call and what outlives them: Ray, the engines and the grade dispatcher.

In: a checked config and who asks for which CPUs and GPUs. Out: the actors that the stages of every plan know by name.
Everything heavy is started once, in parallel, and ended together; plans come and go in between. This is all that a plan
without a learner needs.
"""

import contextlib
import logging
import math
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray

from raypipe.config import Config, engine_count, grader_actors, heldout_response_length
from raypipe.engines.vllm import start_engines
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.pipeline import Workers
from raypipe.plan_process import start_quiet_stats
from raypipe.resources import Demand

# Seconds that resident actors have to end what they started, as a rule and after a signal.
CLOSE_S, HURRIED_CLOSE_S = 20.0, 4.0


# Settings of a Ray that raypipe starts, where the environment has no others. A run has more processes than cores, most
# of them idle, and Ray would warn of each few. What Ray keeps of the past would grow with each iteration: 100,000 tasks
# and 100,000 dead actors for its dashboard, and (see `start_ray`) every series of every process until a Prometheus
# comes for it. glibc has 8 arenas a core, each with its own freed memory, for the dozens of threads of a Ray worker.
# Torch's threads would spin until the last of them is done, on the very core that it waits for: beside one busy process
# a step with 2 threads on 2 cores takes twice as long.
RAY_SETTINGS = {
    "MALLOC_ARENA_MAX": "2",
    "OMP_WAIT_POLICY": "passive",
    "RAY_worker_maximum_startup_concurrency": "16",
    "RAY_task_events_max_num_task_in_gcs": "5000",
    "RAY_maximum_gcs_destroyed_actor_cached_count": "200",
    "RAY_maximum_gcs_dead_worker_cached_count": "200",
}


def start_ray(config: Config, cpus: float) -> str:
    """Connects to the cluster of `RAY_ADDRESS`, or starts Ray on this machine, its dashboard bound to loopback and with
    token authentication, which is Ray's default. Returns the dashboard's address, or "" if there is none.

    Here CPUs are a count that Ray schedules by, not a fence, so at least the `cpus` that the run asks for are declared.
    """
    # Graders may be known by the current folder alone.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}
    options: dict[str, Any] = {"runtime_env": {"env_vars": path}}
    settings: dict[str, str] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # Inherited, since none of the processes that Ray keeps ready would do for a runtime_env of its own: a plan
        # would take a quarter longer to start.
        wanted = RAY_SETTINGS | {"RAY_enable_metrics_collection": str(int("prometheus" in config.log.loggers))}
        settings = path | {name: os.environ.get(name, value) for name, value in wanted.items()}
        options = {
            "address": "local",  # not a cluster that happens to run here
            "num_cpus": max(len(os.sched_getaffinity(0)), math.ceil(cpus)),
            "dashboard_host": "127.0.0.1",
            "include_dashboard": config.log.dashboard,
        }
    with environment(settings):
        context: Any = ray.init(
            ignore_reinit_error=True, namespace=f"raypipe/{config.run.name}", logging_level=logging.ERROR,
            log_to_driver=config.log.workers, **options,
        )  # fmt: skip
    start_quiet_stats()
    return f"http://{context.dashboard_url}" if context.dashboard_url else ""


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """These variables, for what is started meanwhile."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def ray_session(config: Config, cpus: float) -> Iterator[str]:
    """Ray while it is open: the one that this process has already (a notebook's), else one of its own, with the address
    of its dashboard. A Ray that goes on keeps no actor of the run.

    Raises ValueError where a run of that name is at work in a Ray that was there before.
    """
    name = config.run.name
    if not ray.is_initialized():
        try:
            yield start_ray(config, cpus)
        finally:
            ray.shutdown()
        return
    if there := actors_of(name):
        raise ValueError(
            f"run.name={name!r} is at work in this Ray already ({', '.join(there)}): close what it belongs to, a "
            "raypipe.Pipeline say, or set another run.name"
        )
    try:
        yield ""
    finally:
        for actor in actors_of(name):
            with contextlib.suppress(ValueError):  # it ended by itself
                ray.kill(ray.get_actor(actor))
        deadline = time.monotonic() + CLOSE_S
        while actors_of(name) and time.monotonic() < deadline:  # their names are free a moment later
            time.sleep(0.05)


def actors_of(run_name: str) -> list[str]:
    """Names of the run's actors in this Ray, as `{run_name}/plans`."""
    return [name for name in ray.util.list_named_actors() if name.startswith(f"{run_name}/")]


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
