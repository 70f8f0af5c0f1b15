"""Other places where a run's metrics go: one function a backend, chosen by `log.loggers`.

In: an iteration's metrics line, and its best, worst and failed samples (`samples.pick`). Out: a TensorBoard, Weights &
Biases, MLflow or Trackio run, and gauges for Prometheus. Decision: `metrics.jsonl` and `samples/` stay the record;
these are views of it, in the run's folder or beside it, and need no account: W&B writes offline unless WANDB_API_KEY or
WANDB_MODE says otherwise, MLflow to a file unless MLFLOW_TRACKING_URI does. A tracker that fails (a server that is
gone) is told once and never ends the run.
"""

import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.metrics import legend
from raypipe.run_folder import RunFolder, without_secrets

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
Samples = Sequence[Mapping[str, Any]]
# Columns of a table of samples.
COLUMNS = ("kind", "purpose", "prompt_id", "prompt", "response", "ground_truth", "score", "status")
MAX_TEXT = 4000


@dataclass(frozen=True)
class Tracker:
    """log(iteration, metrics, samples) writes one iteration; close() ends it."""

    log: Callable[[int, Metrics, Samples], None]
    close: Callable[[], None]


def tensorboard(folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """Event files in `tensorboard/`: tensorboard --logdir runs"""
    from tensorboardX import SummaryWriter

    # purge_step hides what was written for iterations that are done again; the suffix keeps a run that goes on within
    # the same second from writing over its file.
    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=first or None, filename_suffix=f".{first}")

    def log(iteration: int, metrics: Metrics, samples: Samples) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
        for kind, text in _as_text(samples).items():
            writer.add_text(f"samples/{kind}", text, iteration)
        writer.flush()

    return Tracker(log, writer.close)


def wandb(folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """A run in `wandb/`, offline without a key; `wandb sync` uploads it."""
    import wandb as module

    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    run = module.init(
        project=os.environ.get("WANDB_PROJECT", "raypipe"), name=folder.path.name, dir=str(folder.path),
        config=dict(config), mode=mode, resume="allow", id=_id_of(folder.path),
        settings=module.Settings(console="off", silent=True),
    )  # fmt: skip

    def log(iteration: int, metrics: Metrics, samples: Samples) -> None:
        row: dict[str, Any] = dict(metrics)
        if samples:
            row["samples"] = module.Table(columns=list(COLUMNS), data=_as_rows(samples))
        run.log(row, step=iteration)

    return Tracker(log, run.finish)


def trackio(folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """A run in `trackio/` of run.dir, beside those of the other runs: TRACKIO_DIR=runs/trackio trackio show"""
    os.environ.setdefault("TRACKIO_DIR", str(folder.path.parent.resolve() / "trackio"))  # it reads that when imported
    import trackio as module

    run = module.init(
        project=os.environ.get("TRACKIO_PROJECT", "raypipe"), name=folder.path.name, config=dict(config),
        resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip

    def log(iteration: int, metrics: Metrics, samples: Samples) -> None:
        row: dict[str, Any] = dict(metrics)
        if samples:
            # It shows text as Markdown, in which an indented block stays as it is.
            cells = [[_block(cell) if isinstance(cell, str) else cell for cell in line] for line in _as_rows(samples)]
            row["samples"] = module.Table(columns=list(COLUMNS), data=cells)
        run.log(row, step=iteration)

    return Tracker(log, run.finish)


def mlflow(folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """A run at MLFLOW_TRACKING_URI, or in `mlflow.db` of run.dir: mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    runs, server = folder.path.parent.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(server or f"sqlite:///{runs}/mlflow.db")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "raypipe")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:  # a server has a place for artifacts of its own
        place = None if server else (runs / "mlflow").as_uri()
        experiment_id = client.create_experiment(name, artifact_location=place)
    else:
        experiment_id = experiment.experiment_id
    tag = {"raypipe.run": _id_of(folder.path)}
    known = client.search_runs([experiment_id], f"tags.`raypipe.run` = '{tag['raypipe.run']}'", max_results=1)
    run_id = (known[0] if known else client.create_run(experiment_id, run_name=folder.path.name, tags=tag)).info.run_id
    if known:
        client.update_run(run_id, status="RUNNING")
    else:
        params = [Param(key, json.dumps(value)[:MAX_TEXT]) for key, value in config.items()]
        client.log_batch(run_id, params=params)

    def log(iteration: int, metrics: Metrics, samples: Samples) -> None:
        now = int(time.time() * 1000)
        # Its names have no more than these characters.
        named = [Metric(re.sub(r"[^\w\-. :/]", "_", key), value, now, iteration) for key, value in metrics.items()]
        for start in range(0, len(named), 1000):  # the most that it takes in one call
            client.log_batch(run_id, metrics=named[start : start + 1000])
        if samples:
            columns = map(list, zip(*_as_rows(samples), strict=True))
            client.log_table(run_id, dict(zip(COLUMNS, columns, strict=True)), f"samples/{iteration:06d}.json")

    return Tracker(log, lambda: client.set_terminated(run_id))


def prometheus(folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """Gauges that Ray exports to Prometheus beside its own, as ray_raypipe_reward_mean{run="..."} and so on; the
    dashboard examples/grafana/raypipe.json shows them."""
    from ray.util.metrics import Gauge

    gauges: dict[str, Gauge] = {}

    def log(iteration: int, metrics: Metrics, samples: Samples) -> None:
        for name, value in metrics.items():
            if name not in gauges:
                unit, meaning = legend(name) or ("", name)
                text = f"{meaning} ({unit})" if unit else meaning
                gauges[name] = Gauge(prometheus_name(name), description=text, tag_keys=("run",))
            gauges[name].set(value, {"run": folder.path.name})

    return Tracker(log, lambda: None)


def prometheus_name(metric: str) -> str:
    """A metric's name in Prometheus, but for the ray_ that Ray puts before it. Names take letters, digits and single
    underscores."""
    return "raypipe_" + re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")


# Name in log.loggers -> (function, package that it needs).
BACKENDS: dict[str, tuple[Callable[[RunFolder, Mapping[str, Any], int], Tracker], str]] = {
    "tensorboard": (tensorboard, "tensorboardX"),
    "prometheus": (prometheus, "ray"),
    "wandb": (wandb, "wandb"),
    "mlflow": (mlflow, "mlflow"),
    "trackio": (trackio, "trackio"),
}


def check_loggers(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is not known, or whose package is not installed."""
    for i, name in enumerate(names):
        if name not in BACKENDS:
            raise ValueError(f"log.loggers.{i}={name!r} is not known; choose among {', '.join(BACKENDS)}")
        package = BACKENDS[name][1]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # without an origin: a mere folder of that name, such as W&B makes
            raise ValueError(
                f"log.loggers.{i}={name!r} needs the package {package}, which is not installed; pip install {package}, "
                "or leave it out of log.loggers"
            )


def open_loggers(names: Sequence[str], folder: RunFolder, config: Mapping[str, Any], first: int) -> Tracker:
    """All the trackers of `names` (checked by `check_loggers`) as one. `first`: the iteration at which the run begins
    or goes on.

    Raises:
        ValueError: one cannot start (no connection, say).
    """
    trackers = []
    for name in names:
        try:
            trackers.append(BACKENDS[name][0](folder, without_secrets(config), first))
        except Exception as error:
            raise ValueError(
                f"log.loggers: {name} cannot start: {type(error).__name__}: {error}; leave it out of log.loggers, or "
                "see what it needs"
            ) from error
    broken: set[int] = set()

    def each(call: Callable[[Tracker], None]) -> None:
        for i, tracker in enumerate(trackers):
            try:
                call(tracker)
            except Exception as error:  # trackers raise whatever their servers and files make them raise
                if i not in broken:
                    logger.warning("log.loggers: %s failed and may lack iterations: %s", names[i], error)
                broken.add(i)

    return Tracker(
        lambda iteration, metrics, samples: each(lambda tracker: tracker.log(iteration, metrics, samples)),
        lambda: each(lambda tracker: tracker.close()),
    )


def _as_rows(samples: Samples) -> list[list[Any]]:
    return [[_cell(sample[name]) for name in COLUMNS] for sample in samples]


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float) or value is None else str(value)[:MAX_TEXT]


def _as_text(samples: Samples) -> dict[str, str]:
    """Markdown a kind of sample. An indented block is shown as it is, whatever a model wrote into it."""
    texts: dict[str, str] = {}
    for sample in samples:
        block = _block(f"{sample['prompt']}\n---\n{sample['response']}"[:MAX_TEXT])
        head = f"**{sample['prompt_id']}** ({sample['purpose']}): {sample['status']}, score {sample['score']}"
        kind = sample["kind"]
        texts[kind] = texts.get(kind, "") + f"{head}\n\n{block}\n\n"
    return texts


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _id_of(path: Path) -> str:
    """The same for a run that goes on, another for each folder."""
    import hashlib

    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
