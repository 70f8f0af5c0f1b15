"""Does memory stay flat? What each kind of process holds, iteration after iteration, and the slope of it.

Needs: nothing but the installation; --real also a model and data, which configs/demo.yaml names (`make demo` makes
them). Without it engine and learner are scripted, while plans, feed, grader processes, driver and run folder are real:
an iteration is 8 prompts of 4 samples and takes what its plan takes to start. A kind is flat if its slope after the
warm-up, by least squares of the means of ten stretches (iterations one after the other are not independent), is less
than twice its standard error, or adds less than 1% or 4 MiB in all. Of stages and idle workers, whose number changes,
it is the memory of one, of all others that of all processes of the kind.

    python examples/bench/memory.py [--quick] [--iterations 200] [--warm-up 100] [--real]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ray

from raypipe.config import (
    Config,
    DataConfig,
    GradeConfig,
    GraderConfig,
    LogConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
)
from raypipe.console import Console
from raypipe.logbook import Logbook
from raypipe.loggers import Tracker
from raypipe.memory import MemoryWatch
from raypipe.residents import start_ray
from raypipe.run_folder import RunFolder, read_lines
from raypipe.scripted import scripted_run

MIB_A_GIB = 1024
PROMPTS, SAMPLES = 8, 4
STRETCHES = 10
CHANGING = ("stages", "idle")  # kinds of which there are now more processes, now less
# Two things that stop growing, here within the warm-up: the connections of workers that have ended, which Ray holds for
# up to ten minutes, and what vLLM on CPU keeps of each new number of tokens in a batch, up to 1024 oneDNN primitives.
SOON_FULL = {"RAY_subscriber_timeout_ms": "20000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}


class LengthGrader:
    """A score from nothing but the text, so that what is measured is raypipe."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [float(len(text) % 2) for text in solution_strs]


class Trend(NamedTuple):
    """Of one kind, in MiB: mean, slope an iteration with its standard error, and what that adds over all of them."""

    mean: float
    slope: float
    error: float
    added: float

    @property
    def is_flat(self) -> bool:
        return self.slope < 2 * self.error or self.added < max(4.0, 0.01 * self.mean)


def trend(values: list[float]) -> Trend:
    """Of values in MiB, an iteration each, at least STRETCHES of them."""
    middles, means = [
        [part.mean() for part in np.array_split(series, STRETCHES)] for series in (np.arange(len(values)), values)
    ]
    (slope, _), covariance = np.polyfit(middles, means, 1, cov=True)
    return Trend(float(np.mean(values)), float(slope), float(covariance[0, 0] ** 0.5), float(slope * len(values)))


def held(line: dict[str, float], kind: str) -> float:
    """MiB of a kind, or of one of its processes, in an iteration's metrics."""
    mib = MIB_A_GIB * line[f"memory/{kind}_gib"]
    return mib / line[f"memory/{kind}_processes"] if kind in CHANGING else mib


def scripted(folder: Path, iterations: int) -> list[dict[str, float]]:
    """The metrics of a run without a model."""
    config = Config(
        run=RunConfig(name="memory", iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["scripted"], train_batch_size=PROMPTS),
        rollout=RolloutConfig(n=SAMPLES, max_response_length=64),
        grade=GradeConfig(graders=[GraderConfig(path=f"{__file__}:LengthGrader")], processes=1),
        pipeline=PipelineConfig(plans_ahead=2),
        log=LogConfig(timelines=[]),
    )
    (folder / "samples").mkdir()
    (folder / "timelines").mkdir()
    run_folder, console = RunFolder(folder, resumed=False), Console(iterations, quiet=True)
    log = Logbook(config, run_folder, console, Tracker(lambda *_: None, lambda: None))
    start_ray(config, cpus=4)
    with scripted_run(config, prompts=256, tokens=(16, 64)) as run:
        feed, memory = run.feed(), MemoryWatch()
        for iteration in range(iterations):
            rows = [row for block in feed.rows(iteration) for row in block]
            assert len(rows) == PROMPTS * SAMPLES
            now = time.time()
            span = {"lane": "learner-0", "name": "train", "start": now, "end": now}
            record = {"rows": rows, "spans": [span], "metrics": memory.read()}
            run.open_gates(iteration + 1)
            run.server.report.remote(0, iteration, 0, record)
            records = ray.get(run.server.told.remote(iteration, 0, 60.0)).records
            log.write(iteration, records)
    ray.shutdown()
    return run_folder.read_metrics()


def real(folder: Path, iterations: int) -> list[dict[str, float]]:
    """The metrics of a run of configs/demo.yaml, with a KV cache that soon has been used as a whole: until then the
    engine grows by what each iteration uses of it for the first time."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "raypipe.train", "--config", "configs/demo.yaml", f"run.dir={folder}"]
    subprocess.run(
        [*command, "run.name=memory", f"run.iterations={iterations}", "log.quiet=true", "engine.kv_cache_gib=0.1"],
        cwd=root, check=True,
    )  # fmt: skip
    return [line for line in read_lines(folder / "memory" / "metrics.jsonl") if line["iteration"] < iterations]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 iterations")
    parser.add_argument("--iterations", type=int, default=0, help="those measured: 200, or 30 with --real")
    parser.add_argument("--warm-up", type=int, default=0, help="iterations before: 100, or 60 with --real")
    parser.add_argument("--real", action="store_true", help="vLLM and the learner, on configs/demo.yaml")
    options = parser.parse_args()
    iterations = options.iterations or (12 if options.quick else 30 if options.real else 200)
    warm_up = options.warm_up or (3 if options.quick else 60 if options.real else 100)
    os.environ.update(SOON_FULL)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lines = (real if options.real else scripted)(Path(folder), warm_up + iterations)
    print(f"{len(lines)} iterations in {time.perf_counter() - begin:.0f} s, {warm_up} of them to warm up")
    lines = lines[warm_up:]
    figures = {}
    names = {name for line in lines for name in line if name.endswith("_gib")}
    for kind in sorted(name.removeprefix("memory/").removesuffix("_gib") for name in names):
        found = trend([held(line, kind) for line in lines if f"memory/{kind}_gib" in line])
        figures[kind] = {**{key: round(value, 4) for key, value in found._asdict().items()}, "flat": found.is_flat}
        print(
            f"{kind:>12}: {found.mean:8.1f} MiB, {found.slope:+.3f} +- {found.error:.3f} an iteration, "
            f"{found.added:+.1f} in all{'' if found.is_flat else '   NOT FLAT'}"
        )
    print(json.dumps({"bench": "memory", "iterations": len(lines), "real": options.real, **figures}))


if __name__ == "__main__":
    main()
