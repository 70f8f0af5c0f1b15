"""The cluster recipes: what they start is what their run asks for, and they speak of commands and keys that exist."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.config import Config
from raypipe.config_file import load_config
from raypipe.placement import Node
from raypipe.resources import Machine, demands, missing
from raypipe.train import main

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "cluster"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text())["spec"]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(FOLDER / "run.yaml")


def nodes_of(job: dict[str, Any]) -> list[Node]:
    """The Ray nodes that the job's groups start."""
    found = []
    for group in (job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        cpus = float(group["rayStartParams"].get("num-cpus", limits["cpu"]))
        node = Node(cpus, float(limits.get("nvidia.com/gpu", 0)), group["labels"])
        found += [node] * group.get("replicas", 1)
    return found


def test_the_job_runs_the_command_with_keys_that_exist(job, tmp_path, capsys):
    words = shlex.split(job["entrypoint"])
    assert words[:4] == ["python", "-m", "raypipe.train", "--config"] and words[4] == "/shared/run.yaml"
    assert load_config(FOLDER / "run.yaml", words[5:]).run.resume == "auto"
    # The command itself takes them: it gets as far as the model, which is not on this machine.
    assert main(["--config", str(FOLDER / "run.yaml"), *words[5:], "--dry-run"]) == 1
    assert "model.path=/shared/models/" in capsys.readouterr().err


def test_the_job_has_what_its_run_asks_for(job, config):
    machine = Machine(tuple(nodes_of(job)), local=False)
    asked = demands(config, machine)
    assert {demand.actor for demand in asked} == {"engine", "learner rank", "grader host", "scorer"}
    assert not missing(asked, machine)
    assert sum(d.count * d.gpus for d in asked) == machine.gpus, "no GPU is paid for and not used"


def test_without_any_of_its_groups_the_run_would_not_fit(job, config):
    everything = nodes_of(job)
    for pool in ("engines", "learner", "cpu"):
        machine = Machine(tuple(node for node in everything if node.labels["pool"] != pool), local=False)
        assert missing(demands(config, machine), machine), pool


def test_the_cluster_is_authenticated_and_of_the_ray_that_is_installed(job):
    import ray

    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert ray.__version__ == job["rayClusterSpec"]["rayVersion"]


def test_all_nodes_see_the_shared_folder(job, config):
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["shared"] == "/shared" and {"shared", "memory"} <= {volume["name"] for volume in pod["volumes"]}
    files = [config.run.dir, config.model.path, *config.data.train_files, *config.data.val_files]
    assert all(name.startswith("/shared/") for name in files)


@pytest.fixture
def shell(tmp_path):
    """Runs start.sh with programs in place of ray and python that print how they were called."""
    for name in ("ray", "python"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*; $RAY_AUTH_MODE $RAY_AUTH_TOKEN_PATH $RAY_ADDRESS"\n')
        program.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SHARED": str(shared), **environment}
        return subprocess.run([FOLDER / "start.sh", *arguments], capture_output=True, text=True, env=env)

    run.token = shared / "ray_token"  # type: ignore[attr-defined]
    return run


def test_a_head_makes_a_token_that_only_its_owner_reads(shell):
    told = shell("head").stdout
    assert told.startswith("ray start --head --port 6379") and f"; token {shell.token}" in told
    assert shell.token.stat().st_mode & 0o777 == 0o600
    before = shell.token.read_text()
    assert before and shell("head", PORT="7000").stdout.startswith("ray start --head --port 7000")
    assert shell.token.read_text() == before, "a head that starts again lets its nodes in"


def test_nodes_and_runs_go_to_the_head_with_its_token(shell):
    node = shell("node", "10.0.0.1", "pool=engines").stdout
    assert node.startswith("ray start --address 10.0.0.1:6379 --labels pool=engines --block; token")
    train = shell("train", "10.0.0.1", "--config", "/shared/run.yaml", "run.name=a b").stdout
    assert train.startswith("python -m raypipe.train --config /shared/run.yaml run.name=a b; token")
    assert train.rstrip().endswith(" 10.0.0.1:6379")


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "is head, node or train"), (["node"], "address of the head"), (["up"], "up: write")]
)
def test_a_wrong_call_of_the_script_is_told(shell, arguments, message):
    done = shell(*arguments)
    assert done.returncode and message in done.stderr


def test_the_script_passes_options_that_ray_start_has():
    from ray.scripts.scripts import start

    known = {name for option in start.params for name in option.opts}
    used = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"exec ray start .*", (FOLDER / "start.sh").read_text()))))
    assert used and used <= known
