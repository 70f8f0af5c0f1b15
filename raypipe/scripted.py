"""A run without models, for tests and benchmarks: the real plan, gate, plan server, feed and grade dispatcher around
scripted engines.

In: a config and how engines should behave. Out: a `ScriptedRun` whose rows are read as a learner rank reads them.
"""

import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raypipe.config import Config, grader_actors
from raypipe.engines.scripted import ScriptedEngine
from raypipe.feed import Feed
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.pipeline import Workers
from raypipe.plans import start_plan_server
from raypipe.prompts import Prompt
from raypipe.reserve import start_reserve


@dataclass
class ScriptedRun:
    config: Config
    engines: list[Any]
    dispatcher: Any
    server: Any

    def feed(self, rank: int = 0, attempt: int = 0) -> Feed:
        config = self.config
        before = int(config.rollout.carry_over > 0)
        return Feed(self.server, rank, attempt, config.run.iterations, config.pipeline.plans_ahead, before)

    def open_gates(self, version: int) -> None:
        ray.get([engine.open_gate.remote(version) for engine in self.engines])

    def rows(self, feeds: list[Feed], iteration: int) -> list[list[dict]]:
        """An iteration's rows, all ranks reading at the same time, by rank."""
        found: list[list[dict]] = [[] for _ in feeds]

        def read(rank: int) -> None:
            for block in feeds[rank].rows(iteration):
                received = time.time()
                found[rank] += [row | {"received": received} for row in block]

        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(len(feeds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "an iteration did not end within 120 s"
        return found


def scripted_prompts(count: int) -> list[Prompt]:
    ids = [array("i", [1 + i % 50, 2, 3]) for i in range(count)]
    return [Prompt(f"p{i}", "toy", f'"q{i}"', f"q{i}", ids[i], '"1"', "{}") for i in range(count)]


@contextmanager
def scripted_run(
    config: Config, prompts: int = 32, heldout: int = 0, engines: int = 1, **engine: Any
) -> Iterator[ScriptedRun]:
    """A run over scripted engines; `engine` are their arguments (see `ScriptedEngine`), e.g. seconds=(0.1, 0.5)."""
    actors: list[Any] = [
        ray.remote(ScriptedEngine)
        .options(name=f"{config.run.name}/engine-{i}", num_cpus=0, max_concurrency=100_000)
        .remote(f"engine-{i}", **engine)
        for i in range(engines)
    ]
    data = scripted_prompts(prompts + heldout)
    try:
        with plan_run(config, actors, data[:prompts], data[prompts:]) as run:
            yield run
    finally:
        for actor in actors:
            ray.kill(actor)


@contextmanager
def plan_run(config: Config, engines: list[Any], train: list[Prompt], heldout: list[Prompt]) -> Iterator[ScriptedRun]:
    """Plans, graders and feed, without a learner, around engines of any kind named `{run}/engine-{i}`."""
    name = config.run.name
    dispatcher = start_dispatcher(config.grade, grader_actors(config), name, cpus_per_host=0)
    reserve, reserve_name = start_reserve(config)
    sampling = {"max_tokens": config.rollout.max_response_length, "top_p": 1.0, "stop": config.rollout.stop}
    workers = Workers(
        engines=[f"{name}/engine-{i}" for i in range(len(engines))],
        dispatcher=f"{name}/grade-dispatcher",
        grade_actors=grader_actors(config),
        reserve=reserve_name,
        stages=config.pipeline.stages,
        sampling={"train": {**sampling, "temperature": 1.0}, "heldout": {**sampling, "temperature": 0.0}},
    )
    server = start_plan_server(config, train, heldout, workers)
    ray.get([dispatcher.start.remote(), *(engine.ready.remote() for engine in engines), server.begin.remote()])
    try:
        yield ScriptedRun(config, engines, dispatcher, server)
    finally:
        ray.get(dispatcher.close.remote())
        for actor in filter(None, [dispatcher, server, reserve]):
            ray.kill(actor)
