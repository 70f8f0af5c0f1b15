"""A run that is killed, at any moment and again and again, ends as one that was not."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import killable_run
import numpy as np
import pytest
from tiny_models import save_model, tiny_model

from raypipe.run_folder import read_lines

DEADLINE_S = 120


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    # What takes long to import is there once, so that each process begins at once.
    heavy = ["raypipe.learner", "raypipe.plans", "raypipe.scripted", "transformers.models.llama.modeling_llama"]
    context.set_forkserver_preload(heavy)
    return context


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_model(tiny_model(), tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    # So that the result depends on the state of the random number generator.
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return folder


def seen(folder: Path) -> list[tuple[int, list[str]]]:
    path = folder.with_suffix(".seen")
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def steps_begun(folder: Path) -> int:
    return len(list((folder / "checkpoints").glob(".step_*.partial/state")))


# When to kill, from what a process has done since it began: `begun`, iterations; `written`, the checkpoint `latest`.
MOMENTS: dict[str, Callable[[Path, int, str], bool]] = {
    "before the first checkpoint": lambda folder, begun, written: begun >= 2,
    "as one is written": lambda folder, begun, written: steps_begun(folder) > 0,
    "as one becomes the latest": lambda folder, begun, written: latest(folder) != written,
    "as another is written": lambda folder, begun, written: begun >= 2 and steps_begun(folder) > 0,
    "in the third iteration": lambda folder, begun, written: begun >= 3,
}


def latest(folder: Path) -> str:
    path = folder / "checkpoints" / "latest"
    return path.read_text() if path.exists() else ""


def test_a_run_that_is_killed_again_and_again_sees_the_same_prompts_and_ends_with_the_same_parameters(
    context, model, tmp_path
):
    straight, killed = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    process = context.Process(target=killable_run.train, args=(model, straight))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0

    for moment, has_come in MOMENTS.items():
        before, written = len(seen(killed)), latest(killed)
        process = context.Process(target=killable_run.train, args=(model, killed))
        process.start()
        deadline = time.monotonic() + DEADLINE_S
        while not has_come(killed, len(seen(killed)) - before, written):
            assert process.is_alive() and time.monotonic() < deadline, moment
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL, f"{moment}: it had ended before"
    process = context.Process(target=killable_run.train, args=(model, killed))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0

    prompts = dict(seen(straight))
    assert sorted(prompts) == list(range(killable_run.ITERATIONS))
    assert all(prompts[iteration] == own for iteration, own in seen(killed))
    assert len(seen(killed)) > len(prompts), "something was done again"
    lines = [read_lines(folder / "metrics.jsonl") for folder in (straight, killed)]
    assert [line["iteration"] for line in lines[1]] == list(range(killable_run.ITERATIONS))
    assert lines[0] == lines[1]
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["latest", "step_10", "step_12"]
    with np.load(straight.with_suffix(".npz")) as a, np.load(killed.with_suffix(".npz")) as b:
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
