"""The plan at the size of a big cluster: 1,024, 4,096 and 16,384 samples an iteration, on a machine without one.

Needs: nothing but the installation; 2 cores and 8 GB are enough. Real are the plan, the gate, the feed, the grading
queue, the learner's loop over two ranks and the driver's record of each iteration, on a Ray cluster of three nodes
(raylets) of this machine. Scripted is what would need accelerators: engines sleep as long as a response takes, learners
as long as its tokens take to train on. Lengths are long-tailed (median 150 tokens, few reach 1,024), and so are
graders (median 0.3 s, few take 10 s). Engines are as wide as it takes to finish `--rate` samples a second.

Executor: the process that hosts Ray Data's executor, one a plan; its CPU time holds its start. Memory is measured over
20 short iterations.

    python examples/bench/simulate.py [--quick] [--samples 1024,4096,16384] [--rate 200] [--out FOLDER]
"""

import argparse
import dataclasses
import io
import json
import math
import os
import re
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import scripted_learner
import stand_ins
from ray.cluster_utils import Cluster

from raypipe.config import (
    Config,
    DataConfig,
    GradeConfig,
    GraderConfig,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from raypipe.console import Console
from raypipe.engines.scripted import LongTail
from raypipe.logbook import Logbook
from raypipe.loggers import open_loggers
from raypipe.run_folder import open_run
from raypipe.scripted import scripted_run

NODES, ENGINES, RANKS, GROUP = 3, 4, 2, 16
TOKENS = LongTail(median=150, sigma=0.7, most=1024)
SECONDS_PER_TOKEN, SHORT_PER_TOKEN = 0.012, 0.001
GRADER = {"seconds": 0.3, "sigma": 1.0, "most": 10.0}
LEARNER_TOKENS_PER_S = 30_000  # of a rank
UPDATE_S = 0.5
SHORT = 64  # samples of an iteration in which memory is measured
EXECUTOR = "SplitCoordinator"


class Usage:
    """CPU seconds of the cluster's processes, by what they are, read four times a second, dead ones included."""

    def __init__(self) -> None:
        self.driver = psutil.Process()
        self.seconds: dict[tuple[float, int], tuple[str, float]] = {}  # role and CPU by a process's start and id
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Usage":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(0.25):
            for process in self.driver.children(recursive=True):
                try:
                    role, spent = role_of(process.cmdline()), process.cpu_times()
                    self.seconds[process.create_time(), process.pid] = (role, spent.user + spent.system)
                except psutil.Error:
                    continue  # it has just ended

    def plans(self) -> list[float]:
        """Of the executors, in the order of their start."""
        return [spent for _, (role, spent) in sorted(self.seconds.items()) if role == EXECUTOR]

    def by_role(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for role, spent in self.seconds.values():
            total[role] += spent
        return total


def role_of(command: list[str]) -> str:
    """What a process is: the class of a Ray actor or stage, else the name of its program."""
    title = " ".join(command)
    found = re.match(r"ray::(?:\w+\(MapBatches\((\w+)\)\)|(\w+))", title)
    if found:
        return found[1] or found[2]
    return next((name for name in ("raylet", "gcs_server") if f"/{name} " in title), "other processes")


def config_for(samples: int, iterations: int, out: Path, model: Path) -> Config:
    return Config(
        run=RunConfig(name=f"simulate-{samples}x{iterations}", dir=str(out), iterations=iterations),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=["scripted"], train_batch_size=samples // GROUP, max_prompt_length=16),
        rollout=RolloutConfig(n=GROUP, max_response_length=int(TOKENS.most)),
        grade=GradeConfig(
            graders=[GraderConfig(path=stand_ins.WAITING, kwargs=GRADER, max_batch=1)], workers="2", processes=1,
            async_concurrency=1024,
        ),
        train=TrainConfig(ranks=RANKS),
        log=LogConfig(timelines=[], loggers=[]),
    )  # fmt: skip


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray cluster of NODES raylets, this process connected to it."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            nodes.add_node(num_cpus=4)
        nodes.wait_for_nodes()
        ray.init(nodes.address, namespace="simulate", log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run showed.

    metrics: the lines of metrics.jsonl.
    memory_mb: resident memory of the processes that live as long as the run, after each iteration.
    executors: CPU seconds of each plan's executor.
    roles: CPU seconds by what the processes are.
    """

    metrics: list[dict[str, float]]
    memory_mb: list[dict[str, float]]
    executors: list[float]
    roles: Counter[str]


def simulate(config: Config, rate: float, seconds_per_token: float = SECONDS_PER_TOKEN) -> Outcome:
    """Runs `config` over engines that finish `rate` samples a second."""
    slots = math.ceil(rate * TOKENS.mean * seconds_per_token / ENGINES)
    prompts = config.data.train_batch_size * config.run.iterations
    engine = {"tokens": TOKENS, "seconds_per_token": seconds_per_token, "concurrency": slots, "engines": ENGINES}
    folder = open_run(config, dataclasses.asdict(config))
    console = Console(config.run.iterations, quiet=True, stream=io.StringIO())
    log = Logbook(config, folder, console, open_loggers([], folder, {}, 0))
    metrics, memory = [], []
    rank: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(scripted_learner.Rank)
    with tempfile.TemporaryDirectory() as meeting, Usage() as usage, scripted_run(config, prompts, **engine) as run:
        ranks = [rank.remote(i, RANKS, f"{meeting}/ranks") for i in range(RANKS)]
        learning = [actor.learn.remote(run, LEARNER_TOKENS_PER_S, UPDATE_S) for actor in ranks]
        pids = {
            "driver": usage.driver.pid,
            "plan server": ray.get(run.server.__ray_call__.remote(lambda _: os.getpid())),
            "dispatcher": ray.get(run.dispatcher.stats.remote())["pid"],
        }
        lasting = {name: psutil.Process(pid) for name, pid in pids.items()}
        for iteration in range(config.run.iterations):
            while (records := ray.get(run.server.told.remote(iteration, 0, 0.5)).records) is None:
                done, _ = ray.wait(learning, timeout=0)
                ray.get(done)
            metrics.append(log.write(iteration, records))
            memory.append({name: process.memory_info().rss / 1e6 for name, process in lasting.items()})
            held = ", ".join(f"{name} {mb:.0f} MB" for name, mb in memory[-1].items())
            seconds = metrics[-1]["time/iteration_s"]
            print(f"  {config.run.name}, iteration {iteration}: {seconds:.1f} s; {held}", flush=True)
        ray.get(learning)
        for actor in ranks:
            ray.kill(actor)
    return Outcome(metrics, memory, usage.plans(), usage.by_role())


def figures_of(outcome: Outcome, samples: int) -> dict[str, Any]:
    """What is printed of a size; the first iteration's lag holds the start of its plan, so it is left out."""
    warm = outcome.metrics[1:] or outcome.metrics
    return {
        "efficiency": statistics.median(line["efficiency"] for line in warm),
        "iteration_s": statistics.median(line["time/iteration_s"] for line in warm),
        "finished_per_s": statistics.median(samples / line["time/generate_s"] for line in warm),
        "finished_to_graded_start_p95_s": statistics.median(line["lag/graded_p95_s"] for line in warm),
        "executor_cpu_ms_per_sample": 1000 * statistics.median(outcome.executors) / samples,
        "cpu_ms_per_sample": {
            role: round(1000 * spent / samples / len(outcome.metrics), 2)
            for role, spent in outcome.roles.most_common(9)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 samples an iteration, 6 short iterations")
    parser.add_argument("--samples", default="1024,4096,16384", help="samples an iteration, several sizes")
    parser.add_argument("--rate", type=float, default=200.0, help="samples that finish a second")
    parser.add_argument("--iterations", type=int, default=2, help="iterations of each size")
    parser.add_argument("--short", type=int, default=20, help="short iterations; 0: memory is not measured")
    parser.add_argument("--out", type=Path, help="folder for timelines and metrics (default: none are kept)")
    options = parser.parse_args()
    sizes = [512] if options.quick else [int(size) for size in options.samples.split(",") if size]
    short = min(options.short, 6) if options.quick else options.short
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, out = stand_ins.make_tiny_model(Path(scratch, "model")), options.out or Path(scratch, "runs")
        for samples in sizes:
            with cluster():
                outcome = simulate(config_for(samples, options.iterations, out, model), options.rate)
            figures[f"samples_{samples}"] = found = figures_of(outcome, samples)
            print(f"{samples} samples an iteration:")
            for name, value in found.items():
                print(f"  {name:<32} {value if isinstance(value, dict) else round(value, 4)}", flush=True)
        if short:
            with cluster():
                memory = simulate(config_for(SHORT, short, out, model), options.rate, SHORT_PER_TOKEN).memory_mb
            # The first iterations fill caches.
            settled = memory[min(4, short // 2) :]
            figures["memory"] = {name: [settled[0][name], settled[-1][name]] for name in settled[0]}
            for name, (begin, end) in figures["memory"].items():
                print(f"{name}: {begin:.0f} MB at first, {end:.0f} MB {len(settled) - 1} iterations later")
    if options.out:
        print(f"timelines: {options.out}/*/timelines")
    print(json.dumps({"bench": "simulate", **figures}))


if __name__ == "__main__":
    main()
