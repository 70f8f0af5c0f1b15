"""The run folder: names in use, resuming, secrets."""

import dataclasses
import json
import os
import threading

import pytest
import yaml

from raypipe.checkpoint_files import commit, find_start, partial_folder
from raypipe.config import Config, DataConfig, RunConfig
from raypipe.run_folder import last_iteration, open_run, without_secrets


def config(tmp_path, name="demo", resume="never"):
    return Config(run=RunConfig(name=name, dir=str(tmp_path / "runs"), resume=resume))


def open_(tmp_path, **changes):
    cfg = config(tmp_path, **changes)
    return open_run(cfg, dataclasses.asdict(cfg))


def files(folder):
    return sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())


def test_a_new_run_has_its_config_and_places_for_everything(tmp_path):
    folder = open_(tmp_path)
    assert folder.path == tmp_path / "runs" / "demo" and not folder.resumed
    written = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert written["run"]["name"] == "demo" and written["rollout"]["n"] == 8
    assert folder.samples(12) == folder.path / "samples" / "it_000012.jsonl"
    assert folder.timeline(12, ".png") == folder.path / "timelines" / "it_000012.png"
    for path in (folder.samples(1).parent, folder.timeline(1, ".png").parent, folder.checkpoints):
        assert path.is_dir()
    assert files(folder) == ["config.yaml", "metrics.jsonl", "stages.jsonl"]


def test_a_name_in_use_is_refused_with_both_ways_out(tmp_path):
    folder = open_(tmp_path)
    folder.append_metrics({"iteration": 0})
    (tmp_path / "runs" / "demo-2").mkdir()
    before = files(folder)
    with pytest.raises(ValueError) as error:
        open_(tmp_path)
    for part in ("run.name='demo'", str(folder.path), "1 iteration done", "run.name=demo-3", "run.resume=auto"):
        assert part in str(error.value)
    assert files(folder) == before


def test_an_empty_folder_is_not_in_use(tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert not open_(tmp_path).resumed


def test_one_of_many_runs_that_start_at_once_gets_the_name(tmp_path):
    outcomes = []
    barrier = threading.Barrier(8)

    def start():
        barrier.wait()
        try:
            outcomes.append(open_(tmp_path).resumed)
        except ValueError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(False) == 1
    assert all("is in use" in outcome for outcome in outcomes if outcome is not False)


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/tmp/x", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"run\.name"):
        open_(tmp_path, name=name)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match=r"run\.dir=.*cannot be written"):
        open_(tmp_path)


def test_metrics_are_there_as_soon_as_appended(tmp_path):
    folder = open_(tmp_path)
    folder.append_metrics({"iteration": 0, "reward/mean": 0.25})
    folder.append_metrics({"iteration": 1, "reward/mean": 0.5})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == folder.read_metrics()
    assert [line["reward/mean"] for line in folder.read_metrics()] == [0.25, 0.5]
    with pytest.raises(ValueError):
        folder.append_metrics({"iteration": 2, "reward/mean": float("nan")})
    assert len(folder.read_metrics()) == 2


def test_resume_cuts_what_it_does_again(tmp_path):
    folder = open_(tmp_path)
    for i in range(5):
        folder.append_metrics({"iteration": i, "lr": i / 10})
        folder.samples(i).write_text("")
        folder.timeline(i, ".png").write_text("")
    with folder.metrics.open("a") as file:
        file.write('{"iteration": 5, "rewa')  # killed while writing
    again = open_(tmp_path, resume="auto")
    assert again.resumed
    again.resume_at(3)
    again.append_metrics({"iteration": 3, "lr": 9.0})
    assert [(line["iteration"], line["lr"]) for line in again.read_metrics()] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 9.0),
    ]
    assert len(again.metrics.read_text().splitlines()) == 4
    names = [name for name in files(again) if "it_" in name]
    assert names == [f"samples/it_{i:06d}.jsonl" for i in range(3)] + [f"timelines/it_{i:06d}.png" for i in range(3)]


def test_the_name_of_a_run_that_could_not_start_is_free_again(tmp_path):
    open_(tmp_path).give_back()
    folder = open_(tmp_path)
    folder.append_metrics({"iteration": 0})
    folder.give_back()
    with pytest.raises(ValueError, match="in use"):
        open_(tmp_path)


def test_a_new_run_may_begin_where_another_is(tmp_path):
    partial = partial_folder(open_(tmp_path, name="first").checkpoints, 4)
    partial.mkdir()
    step = commit(partial, 4, {"kl_coef": 0.0}, keep_last=1, keep_every=0)
    for resume in (str(step), str(tmp_path / "runs" / "first")):
        folder = open_(tmp_path, name=f"from-{len(resume)}", resume=resume)
        assert not folder.resumed and find_start(folder.checkpoints).path == step
        with pytest.raises(ValueError, match="in use"):
            open_(tmp_path, name=f"from-{len(resume)}", resume=resume)
        assert find_start(open_(tmp_path, name=f"from-{len(resume)}", resume="auto").checkpoints).path == step
    with pytest.raises(ValueError, match="run.resume=.* is no folder"):
        open_(tmp_path, name="second", resume=str(tmp_path / "nowhere"))
    assert not (tmp_path / "runs" / "second").exists()


def test_the_last_iteration_is_that_of_the_last_whole_line(tmp_path):
    folder = open_(tmp_path)
    assert last_iteration(folder.metrics) == -1 and last_iteration(tmp_path / "missing") == -1
    for iteration in range(3):
        folder.append_metrics({"iteration": iteration, "lr": 0.1})
    assert last_iteration(folder.metrics) == 2
    with folder.metrics.open("a") as file:
        file.write('{"iteration": 3, "lr": 0.')
    assert last_iteration(folder.metrics) == 2
    folder.metrics.write_text("x" * 3_000_000 + "\n" + '{"iteration": 7}\n')
    assert last_iteration(folder.metrics) == 7


def test_resume_auto_without_a_run_starts_one(tmp_path):
    folder = open_(tmp_path, resume="auto")
    folder.resume_at(0)
    assert not folder.resumed and folder.read_metrics() == []


def test_a_changed_config_keeps_the_former_one(tmp_path):
    open_(tmp_path)
    same = open_(tmp_path, resume="auto")
    first = (same.path / "config.1.yaml").read_text()
    assert yaml.safe_load(first)["run"]["resume"] == "never"
    open_(tmp_path, resume="auto")
    assert [name for name in files(same) if name.startswith("config")] == ["config.1.yaml", "config.yaml"]
    assert same.changes == ()
    changed = dataclasses.replace(config(tmp_path, resume="auto"), data=DataConfig(columns={"prompt": "q"}))
    folder = open_run(changed, dataclasses.asdict(changed))
    assert folder.changes == ("data.columns.prompt: None -> 'q'",)
    assert open_run(changed, dataclasses.asdict(changed)).changes == ()


def test_no_secret_enters_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("SHORT_SECRET", "e")
    cfg = config(tmp_path)
    kwargs = {
        "api_key": "sk-0123456789",
        "headers": ["Bearer sk-0123456789", {"X": "hf_abcdefgh"}],
        "password": "hunter2",
        "auth_token": "t",
        "eos_token": "</s>",
        "max_tokens": 5,
        "token": None,
        "api_key_": "",
    }
    folder = open_run(cfg, {"grade": {"graders": [{"path": "judge:Judge", "kwargs": kwargs}]}})
    text = (folder.path / "config.yaml").read_text()
    assert not [secret for secret in ("sk-0123456789", "hf_abcdefgh", "hunter2") if secret in text]
    assert yaml.safe_load(text)["grade"]["graders"][0]["kwargs"] == kwargs | {
        "api_key": "${oc.env:JUDGE_API_KEY}",
        "headers": ["Bearer ${oc.env:JUDGE_API_KEY}", {"X": "${oc.env:HF_TOKEN}"}],
        "password": "<secret>",
        "auth_token": "<secret>",
    }


def test_a_config_without_secrets_is_written_as_it_is(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    plain = dataclasses.asdict(Config())
    assert without_secrets(plain) == plain
