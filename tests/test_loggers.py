"""Trackers: what arrives in each backend, and that none can end a run. Those not installed here are passed over."""

import dataclasses
import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from test_pipeline import config_for

from raypipe.config import Config
from raypipe.live import LIVE, live_name
from raypipe.loggers import BACKENDS, check_loggers, open_loggers, prometheus_name
from raypipe.metrics import METRICS
from raypipe.rows import GRADE_STATUSES
from raypipe.run_folder import RunFolder
from raypipe.scripted import scripted_run
from raypipe.spans import RESOURCES

SAMPLE = {
    "kind": "best", "purpose": "train", "prompt_id": "p1", "prompt": "1 + 1", "response": "2\n</script>\u202e\x00",
    "ground_truth": ["2"], "score": 1.0, "status": "ok",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run", resumed=False)


def write(folder: RunFolder, name: str, first: int, last: int) -> None:
    tracker = open_loggers([name], folder, dataclasses.asdict(Config()), first)
    for iteration in range(first, last):
        tracker.log(iteration, {"iteration": iteration, "reward/mean": iteration / 10, "reward/<b>": 1.0}, [SAMPLE])
    tracker.close()


def test_tensorboard_has_scalars_and_samples_and_goes_on(folder):
    write(folder, "tensorboard", 0, 4)
    write(folder, "tensorboard", 3, 6)
    events = [event for file in sorted((folder.path / "tensorboard").iterdir()) for event in read_events(file)]
    rewards = [(e.step, v.simple_value) for e in events for v in e.summary.value if v.tag == "reward/mean"]
    assert [step for step, _ in rewards] == [0, 1, 2, 3, 3, 4, 5]
    assert rewards[-1][1] == pytest.approx(0.5)
    assert any(e.session_log.status == e.session_log.START and e.step == 3 for e in events), "3 is done again"
    texts = [v.tensor.string_val[0].decode() for e in events for v in e.summary.value if "samples/best" in v.tag]
    assert "    2\n    </script>" in texts[0], "as an indented block, which Markdown shows as it is"


def read_events(file: Path):
    """The records of an event file: length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data = file.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_prometheus_gets_the_metrics_from_ray(folder, ray_session):

    write(folder, "prometheus", 0, 3)
    lines = scrape("ray_raypipe_reward_b{")
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert values["ray_raypipe_reward_mean"] == pytest.approx(0.2), "the last iteration's"
    assert values["ray_raypipe_reward_b"] == 1.0
    assert all('run="run"' in line for line in lines if line.startswith("ray_raypipe_") and "_live_" not in line)


def scrape(wanted: str) -> list[str]:
    """What Prometheus reads from Ray, of ours and of Ray Data, once a line begins with `wanted`."""
    import ray

    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 90
    while True:
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line.startswith(("ray_raypipe_", "ray_data_"))]
        if any(line.startswith(wanted) for line in lines):
            return lines
        assert time.monotonic() < deadline, f"Ray exports no {wanted}; it has {lines[:20]}"
        time.sleep(0.5)


def test_prometheus_gets_live_metrics_while_an_iteration_runs(ray_session):
    """One prompt's samples are done, the next iteration's wait at the gate, and the run goes on."""
    config = config_for("live", prompts=2, n=4, iterations=2)
    with scripted_run(config, tokens=(3, 3)) as run:
        feed = run.feed()
        (rows,) = run.rows([feed], 0)
        made: dict[str, float] = {}

        def value(name: str, label: str = "") -> float | None:
            found = [v for k, v in made.items() if k.startswith(f"ray_raypipe_live_{name}{{") and label in k]
            return found[0] if len(found) == 1 else None

        # Two actors report, each in its time.
        wanted = {
            ("tokens_total", 'actor="engine-0"'): 3 * 8, ("grade_lag_seconds_count", ""): 8, ("grading", ""): 0,
            ("grade_statuses_total", 'status="ok"'): 8, ("grade_call_samples_total", ""): 8, ("grade_queued", ""): 0,
            ("weight_version", ""): 0,
        }  # fmt: skip
        assert len(rows) == 8
        deadline = time.monotonic() + 90
        while {which: value(*which) for which in wanted} != wanted:
            assert time.monotonic() < deadline, made
            time.sleep(0.5)
            lines = [line for line in scrape("ray_raypipe_live_") if 'run="live"' in line]
            made = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        calls, lag = value("grade_calls_total", 'grader="FirstTokenGrader"'), value("grade_lag_seconds_sum")
        assert calls and 1 <= calls <= 8 and lag is not None and lag < 8 * 5
        deadline = time.monotonic() + 60
        while not any('run="live"' in line and line.endswith(" 8.0") for line in scrape("ray_raypipe_live_at_gate")):
            assert time.monotonic() < deadline, "the next iteration's requests wait for weights"
            time.sleep(0.5)
        run.open_gates(2)
        assert len(run.rows([feed], 1)[0]) == 8


def test_the_rows_of_a_plan_come_from_a_process_that_ends_with_it(ray_session):
    """Ray Data's actor of statistics would keep some 300 series of each plan for ever."""
    with scripted_run(config_for("rows", prompts=2, n=4, iterations=1), seconds=(1.0, 10.0)) as run:
        reader = threading.Thread(target=run.rows, args=([run.feed()], 0))
        reader.start()
        deadline = time.monotonic() + 60
        generated: dict[float, set[str]] = {}
        while max(generated, default=0.0) < 1 or min(generated) == max(generated):
            assert time.monotonic() < deadline, generated
            lines = [line for line in scrape("ray_raypipe_live_") if 'dataset="rows.000000' in line]
            for line in lines:
                if line.startswith("ray_data_output_rows{") and "Generate" in line:
                    rows = float(line.rpartition(" ")[2])
                    generated[rows] = {re.search(r'WorkerId="(\w+)"', line)[1] for line in lines}  # type: ignore[index]
            time.sleep(0.2)
        assert all(len(workers) == 1 for workers in generated.values()), generated
        reader.join(60)


NOT_SHOWN = ("engine_busy_seconds_total", "grade_kills_total", "grade_running")
GRAFANA = Path(__file__).resolve().parent.parent / "examples" / "grafana" / "raypipe.json"


def test_the_grafana_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads(GRAFANA.read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ray_raypipe_\w+", target["expr"])
    }
    suffixes = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
    live = {f"ray_{live_name(name)}{suffixes[kind]}" for name, (kind, _, _) in LIVE.items()}
    known = {f"ray_{prometheus_name(name)}" for name in METRICS if "<" not in name} | live
    stages = {f"ray_raypipe_idle_{stage.lower()}" for stage in RESOURCES}
    statuses = {f"ray_raypipe_grade_{status}_frac" for status in GRADE_STATUSES}
    assert asked <= known | stages | statuses and len(asked) > 20
    assert live - asked == {f"ray_{live_name(name)}" for name in NOT_SHOWN}, "what the dashboard leaves out"
    assert all('run=~"$run"' in target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_wandb_is_offline_without_a_key(folder, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed here")
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    write(folder, "wandb", 0, 3)
    (run,) = (folder.path / "wandb").glob("offline-run-*")
    deadline = time.monotonic() + 30  # its own process writes on after finish() has returned
    while next(run.glob("*.wandb")).stat().st_size < 500:
        assert time.monotonic() < deadline, "the run's file is not written"
        time.sleep(0.05)


def test_mlflow_keeps_the_runs_of_a_folder_together_and_goes_on(folder, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed here")
    from mlflow import MlflowClient

    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        monkeypatch.delenv(name)
    write(folder, "mlflow", 0, 4)
    write(folder, "mlflow", 4, 6)
    client = MlflowClient(f"sqlite:///{folder.path.parent}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("raypipe").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert json.loads(run.data.params["train"])["lr"] == Config().train.lr
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(i, pytest.approx(i / 10)) for i in range(6)]
    assert run.data.metrics["reward/_b_"] == 1.0, "a name that it would refuse"
    tables = client.list_artifacts(run.info.run_id, "samples")
    assert [Path(table.path).name for table in tables] == [f"{i:06d}.json" for i in range(6)]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, tables[0].path)).read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == SAMPLE["response"]


TRACKIO = """
import sys
from pathlib import Path
from raypipe.loggers import open_loggers
from raypipe.run_folder import RunFolder
from test_loggers import SAMPLE
folder = RunFolder(Path(sys.argv[1]), resumed=False)
for first, last in ((0, 4), (4, 6)):
    tracker = open_loggers(["trackio"], folder, {"run": {"name": "run"}}, first)
    for i in range(first, last):
        tracker.log(i, {"iteration": i, "reward/mean": i / 10}, [SAMPLE])
    tracker.close()
"""


def test_trackio_keeps_the_runs_of_a_folder_together(folder):
    pytest.importorskip("trackio", reason="trackio is not installed here")
    root = Path(__file__).resolve().parent
    path = os.pathsep.join([str(root.parent), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO")} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(folder.path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    (database,) = (folder.path.parent / "trackio").glob("raypipe*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("run", i) for i in range(6)]
    last = json.loads(rows[-1][2])
    assert last["reward/mean"] == 0.5
    (sample,) = last["samples"]["_value"]
    assert "    2\\n    </script>" in json.dumps(sample), "as an indented block"


def test_names_and_missing_packages_are_told(monkeypatch, tmp_path):
    check_loggers(["tensorboard"])
    with pytest.raises(
        ValueError,
        match=r"log.loggers.1='wandbb' is not known; choose among tensorboard, prometheus, wandb, mlflow, trackio",
    ):
        check_loggers(["tensorboard", "wandbb"])
    monkeypatch.setitem(BACKENDS, "wandb", (BACKENDS["wandb"][0], "no_such_module"))
    (tmp_path / "no_such_module").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"log.loggers.0='wandb' needs the package no_such_module.*pip install no_such_module"
    ):
        check_loggers(["wandb"])


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(folder, monkeypatch, caplog):
    from raypipe.loggers import Tracker

    seen = []

    def broken(*arguments):
        raise OSError("server gone")

    monkeypatch.setitem(BACKENDS, "bad", (lambda *_: Tracker(broken, broken), "json"))
    monkeypatch.setitem(BACKENDS, "good", (lambda *_: Tracker(lambda i, *_: seen.append(i), lambda: None), "json"))
    with caplog.at_level(logging.WARNING):
        tracker = open_loggers(["bad", "good"], folder, {}, 0)
        for iteration in range(3):
            tracker.log(iteration, {}, [])
        tracker.close()
    assert seen == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "log.loggers: bad failed and may lack iterations: server gone"
    ]


def test_a_tracker_that_cannot_start_is_named(folder, monkeypatch):
    monkeypatch.setitem(BACKENDS, "bad", (lambda *_: 1 / 0, "json"))
    with pytest.raises(ValueError, match="log.loggers: bad cannot start: ZeroDivisionError"):
        open_loggers(["bad"], folder, {}, 0)


def test_no_secret_reaches_a_tracker(folder, monkeypatch):
    from raypipe.loggers import Tracker

    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    got = {}
    monkeypatch.setitem(
        BACKENDS, "spy", (lambda _, config, first: got.update(config) or Tracker(print, lambda: None), "json")
    )
    open_loggers(["spy"], folder, {"grade": {"graders": [{"kwargs": {"key": "sk-0123456789"}}]}}, 0)
    assert "sk-0123456789" not in str(got) and "oc.env:JUDGE_API_KEY" in str(got)
