"""The pages that move a run over from verl and TRL: their examples run, and their tables name keys that there are."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import save_model, tiny_model

from raypipe.config import Config
from raypipe.config_file import load_config
from raypipe.train import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "examples" / "from_verl.md", ROOT / "examples" / "from_trl.md"]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def files_of(page: Path) -> dict[str, str]:
    """The page's code blocks that have a file's name as title."""
    return dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page.read_text(), re.DOTALL))


def table_of(page: Path) -> list[tuple[list[str], list[str]]]:
    """(their keys, ours) of each row of the page's table."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| .+ \|$", page.read_text(), re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in rows]


def our_keys() -> set[str]:
    return {f"{part.name}.{key.name}" for part in dataclasses.fields(Config) for key in dataclasses.fields(part.type)}


def set_keys(values: dict, prefix: str = "") -> set[str]:
    """Full names of the leaves of a nested mapping."""
    found = set()
    for name, value in values.items():
        found |= set_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def moved(request, tmp_path, monkeypatch) -> Path:
    """A folder with the page's files, its data made, and a small model in the place of the page's."""
    for name, text in files_of(request.param).items():
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=60)
    save_model(tiny_model(), tmp_path / "models" / "Qwen2.5-0.5B-Instruct")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A machine with no GPU, or with one, which engine and learner then share.
ON_ANY_MACHINE = ["engine.num_gpus=0", "train.gpus_per_rank=0", "scorer.num_gpus=0"]


def test_the_moved_config_passes_a_dry_run(moved, capsys):
    assert main(["--config", "raypipe.yaml", "--dry-run", *ON_ANY_MACHINE]) == 0
    report = capsys.readouterr().out
    assert "train: 16 prompts, 0 dropped" in report and "held out: 4 prompts" in report
    assert report.endswith("fits\n")


def test_the_reward_function_grades_the_parquet_file_as_it_is(moved):
    grader = "reward.py:compute_score" if (moved / "reward.py").is_file() else "rewards.py:correct"
    arguments = ["--grader", grader, "--data", "data/responses.parquet", "--out", "scored.parquet", "--processes", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "raypipe.grade", *arguments],
        cwd=moved, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    scored = pq.read_table(moved / "scored.parquet").to_pylist()
    assert [row["score"] for row in scored] == [float(i == 4) for i in range(8)]
    assert {row["grade_status"] for row in scored} == {"ok"}


@pytest.mark.parametrize("name", ["correct", "short"])
def test_trl_functions_take_messages_and_give_scores(name, tmp_path):
    import asyncio
    import inspect

    from raypipe.adapters import load_grader

    (tmp_path / "rewards.py").write_text(files_of(PAGES[1])["rewards.py"])
    grader = load_grader(f"{tmp_path}/rewards.py:{name}", {})
    prompt = [{"role": "user", "content": "1 + 1?"}]
    scores = grader(
        data_sources=["a", "a"], solution_strs=["2", "3" * 400], ground_truths=["2", "2"],
        extra_infos=[{"prompt": prompt}, {"prompt": prompt}],
    )  # fmt: skip
    scores = asyncio.run(scores) if inspect.isawaitable(scores) else scores
    assert scores == {"correct": [1.0, 0.0], "short": [1 - 1 / 400, 0.0]}[name]


@pages
def test_every_key_of_ours_in_the_table_exists(page):
    rows = table_of(page)
    named = {key for _, ours in rows for key in ours}
    assert len(rows) > 40 and len(named) > 30
    assert named <= our_keys(), named - our_keys()
    assert len({key for theirs, _ in rows for key in theirs}) == len(rows), "each key of theirs has one row"


def test_every_key_of_the_verl_example_has_a_row():
    values = yaml.safe_load(files_of(PAGES[0])["verl.yaml"])
    rows = {theirs[0] for theirs, _ in table_of(PAGES[0])}
    covered = {key for key in set_keys(values) if any(key == row or key.startswith(f"{row}.") for row in rows)}
    kwargs = {f"reward.custom_reward_function.reward_kwargs.{name}" for name in ("wrong", "right")}
    assert kwargs <= covered and set_keys(values) == covered, set_keys(values) - covered


def test_every_key_of_the_trl_example_has_a_row():
    names = set(re.findall(r"^    (\w+)=", files_of(PAGES[1])["train_trl.py"], re.MULTILINE)) - {"args"}
    assert len(names) > 30
    rows = {theirs[0] for theirs, _ in table_of(PAGES[1])}
    assert names <= rows, names - rows


@pages
def test_every_key_of_the_moved_config_is_named_in_the_table(page):
    values = yaml.safe_load(files_of(page)["raypipe.yaml"])
    named = {key for _, ours in table_of(page) for key in ours}
    assert set_keys(values) <= named, set_keys(values) - named


def test_values_that_mean_the_same_are_the_same(tmp_path):
    """Where the verl table says so, verl's value stands in the moved config."""
    verl = yaml.safe_load(files_of(PAGES[0])["verl.yaml"])
    (tmp_path / "raypipe.yaml").write_text(files_of(PAGES[0])["raypipe.yaml"])
    ours = dataclasses.asdict(load_config(tmp_path / "raypipe.yaml"))
    same = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \| the same[^|]*\|$", PAGES[0].read_text(), re.MULTILINE)
    compared = 0
    for theirs, our in same:
        value = verl
        for part in theirs.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            section, name = our.split(".")
            assert ours[section][name] == value, our
            compared += 1
    assert compared > 10
