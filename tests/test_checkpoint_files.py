"""Which checkpoint a run goes on from, and which are kept, with files that are no models."""

import json
import shutil
from pathlib import Path

import pytest

from raypipe import checkpoint_files
from raypipe.checkpoint_files import commit, find_origin, find_start, partial_folder, read_progress, steps


def write(folder: Path, iteration: int, keep_last: int = 10, keep_every: int = 0) -> Path:
    partial = partial_folder(folder, iteration)
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "__0_0.distcp").write_bytes(bytes(1000))
    (partial / "state" / ".metadata").write_bytes(bytes(10))
    return commit(partial, iteration, {"kl_coef": 0.5, "under_way": [7, 3]}, keep_last, keep_every)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path) -> Path:
    for iteration in (2, 4, 10):
        write(tmp_path / "run" / "checkpoints", iteration)
    return tmp_path / "run" / "checkpoints"


def test_the_latest_is_gone_on_from_and_nothing_else_is_left(folder):
    start = find_start(folder)
    assert (start.path, start.iteration, start.notes) == (folder / "step_10", 10, ())
    assert names(folder) == ["latest", "step_10", "step_2", "step_4"]
    assert (folder / "latest").read_text() == "step_10"
    progress = read_progress(folder / "step_10")
    assert (progress["kl_coef"], progress["under_way"]) == (0.5, [7, 3])


def test_no_checkpoint_is_no_mistake(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert (find_start(folder).path, find_start(folder).iteration) == (None, 0)
    (tmp_path / ".step_3.partial").mkdir()
    assert find_start(tmp_path).path is None, "one that was being written is none"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


TORN = {
    "a shard is cut": (lambda step: cut(step / "state" / "__0_0.distcp"), r"__0_0.distcp has 999 bytes .* 1000"),
    "a shard is missing": (lambda step: (step / "state" / "__0_0.distcp").unlink(), r"__0_0.distcp: No such file"),
    "all is missing": (shutil.rmtree, r"step_10, which .*latest names, is missing"),
    "progress is missing": (lambda step: (step / "progress.json").unlink(), r"progress.json: No such file"),
    "progress is cut": (lambda step: cut(step / "progress.json"), r"progress.json is damaged"),
    "progress is empty": (lambda step: (step / "progress.json").write_text(""), r"progress.json is damaged"),
    "progress is a list": (lambda step: (step / "progress.json").write_text("[1]"), r"progress.json is damaged"),
    "files is a list": (
        lambda step: (step / "progress.json").write_text('{"iteration": 10, "kl_coef": 0, "files": []}'),
        r"progress.json is damaged",
    ),
}


@pytest.mark.parametrize("harm, reason", TORN.values(), ids=list(TORN))
def test_a_torn_one_is_passed_over_for_the_one_before_with_the_file_and_the_reason(folder, harm, reason):
    harm(folder / "step_10")
    start = find_start(folder)
    assert (start.path, start.iteration) == (folder / "step_4", 4)
    assert len(start.notes) == 1
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(start.notes[0])


@pytest.mark.parametrize("text", [None, "", "step_x", "../../etc", "step_-1", b"\xff\xfe"])
def test_without_a_readable_latest_the_newest_whole_one_is_taken(folder, text):
    latest = folder / "latest"
    latest.unlink() if text is None else latest.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = find_start(folder)
    assert start.path == folder / "step_10" and len(start.notes) == 1 and "latest cannot be read" in start.notes[0]
    cut(folder / "step_10" / "state" / "__0_0.distcp")
    assert find_start(folder).path == folder / "step_4"


def test_latest_may_be_moved_back_and_the_newer_ones_do_not_come_again(folder):
    (folder / "latest").write_text("step_4\n")
    assert find_start(folder).path == folder / "step_4" and find_start(folder).notes == ()
    cut(folder / "step_4" / "progress.json")
    assert find_start(folder).path == folder / "step_2"
    write(folder, 6, keep_last=1)
    assert find_start(folder).path == folder / "step_6"
    assert [path.name for path in steps(folder)] == ["step_6", "step_10"]
    write(folder, 10, keep_last=1)
    assert [path.name for path in steps(folder)] == ["step_10"]


def test_where_none_is_whole_the_run_is_not_begun_anew(folder):
    for step in steps(folder):
        cut(step / "state" / "__0_0.distcp")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* can be read: .*step_10.*step_4.*step_2.*run.resume=PATH"
    ):
        find_start(folder)


def test_the_newest_and_the_multiples_are_kept(tmp_path):
    for iteration in range(1, 10):
        write(tmp_path, iteration, keep_last=2, keep_every=4)
    assert [path.name for path in steps(tmp_path)] == ["step_4", "step_8", "step_9"]
    write(tmp_path, 11, keep_last=2)
    assert [path.name for path in steps(tmp_path)] == ["step_9", "step_11"]


def test_what_fails_on_the_way_leaves_the_older_ones(folder, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(checkpoint_files, "write_text", full)
    with pytest.raises(OSError):
        write(folder, 12, keep_last=1)
    assert find_start(folder).path == folder / "step_10"
    assert {path: path.read_bytes() for path in before} == before


# -- run.resume=PATH ---------------------------------------------------------------------------------------------------


def test_a_path_is_a_checkpoint_or_a_run(folder):
    assert find_origin(str(folder / "step_4")).path == folder / "step_4"
    assert find_origin(str(folder.parent)).path == folder / "step_10"
    cut(folder / "step_10" / "progress.json")
    assert find_origin(str(folder.parent)).path == folder / "step_4"


def test_a_path_that_is_none_says_what_to_write(folder, tmp_path):
    (folder / "step_4" / "hf").mkdir()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (folder / "step_2" / "state" / "__0_0.distcp").unlink()
    for path, reason in {
        tmp_path / "nowhere": "is no folder; name a checkpoint",
        "allways": "run.resume=allways is no folder; .* or write auto or never",
        folder / "step_4" / "hf": "is no checkpoint: .* set model.path",
        tmp_path / "empty": "has no checkpoint yet",
        folder / "step_2": "cannot be used: .*__0_0.distcp: No such file",
    }.items():
        with pytest.raises(ValueError, match=reason):
            find_origin(str(path))


def test_a_run_that_began_elsewhere_goes_on_from_there_until_it_has_its_own(folder, tmp_path):
    own = tmp_path / "other" / "checkpoints"
    own.mkdir(parents=True)
    (own / "started_from").write_text(str(folder / "step_4"))
    assert (find_start(own).path, find_start(own).iteration) == (folder / "step_4", 4)
    write(own, 6)
    assert find_start(own).path == own / "step_6"
    cut(own / "step_6" / "progress.json")
    assert find_start(own).path == folder / "step_4"
    assert json.loads((folder / "step_4" / "progress.json").read_text())["iteration"] == 4
