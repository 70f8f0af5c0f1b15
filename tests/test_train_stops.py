"""When grading or optimizer steps fail so often that the run stops."""

import json
import random

import pytest
from simulated_runs import T, simulated_rows

from raypipe.config import Config, GradeConfig, LogConfig, RunConfig, TrainConfig
from raypipe.console import Console
from raypipe.logbook import (
    Logbook,
    bad_steps_so_far,
    stop_if_grading_fails,
    stop_if_most_fail,
    stop_if_steps_fail,
)
from raypipe.loggers import Tracker
from raypipe.run_folder import RunFolder, read_lines
from raypipe.train import stop_if_unsaved


def row(*statuses, finish_reason="stop"):
    """A graded row; statuses by grader: "math ok", "code error"."""
    grades = [dict(zip(("grader", "status"), status.split(), strict=True)) for status in statuses]
    found = [grade["status"] for grade in grades]
    status = next((status for status in ("crash", "timeout", "error") if status in found), found[0])
    details = [{**grade, "error": "KeyError: 'key'" if grade["status"] == "error" else ""} for grade in grades]
    return {"finish_reason": finish_reason, "grade_status": status, "grades": json.dumps(details)}


def check(rows, most=0.5):
    stop_if_grading_fails(Config(grade=GradeConfig(max_failed_fraction=most)), 3, rows)


def test_up_to_the_fraction_the_run_goes_on():
    check([row("math ok")] * 50 + [row("math timeout")] * 50)
    check([row("math abstain")] * 100)
    check([row("math error")] * 100, most=1.0)
    check([])
    check([row("none error", finish_reason="failed")] * 9 + [row("math ok")])  # generation failed, not grading


def test_past_it_the_run_stops_with_the_commonest_error():
    rows = [row("math ok")] * 4 + [row("math timeout")] + [row("math error")] * 5
    with pytest.raises(ValueError, match="iteration 3: the grader 'math' failed for 6 of 10 samples, over "
                       "grade.max_failed_fraction=0.5; .*commonest error: error: KeyError: 'key'"):  # fmt: skip
        check(rows)


def test_samples_that_were_cut_off_do_not_hide_a_broken_grader():
    surplus = {"finish_reason": "surplus", "grade_status": "abstain", "grades": "[]"}
    with pytest.raises(ValueError, match="the grader 'math' failed for 2 of 3 samples"):
        check([row("math crash")] * 2 + [row("math ok")] + [surplus] * 9)


def test_a_broken_grader_of_a_few_samples_is_found_once_they_are_enough():
    fine = [row("math ok")] * 400
    check(fine + [row("code error")] * 8)  # perhaps one hard prompt
    with pytest.raises(ValueError, match="the grader 'code' failed for 40 of 50 samples"):
        check(fine + [row("code error")] * 40 + [row("code ok")] * 10)


def test_graders_that_fail_on_different_samples_add_up():
    rows = [row("math error", "form ok")] * 40 + [row("math ok", "form error")] * 40 + [row("math ok", "form ok")] * 20
    with pytest.raises(ValueError, match="grading failed for 80 of 100 samples.*commonest error: math: error"):
        check(rows)


def test_skipped_steps_stop_the_run_when_there_are_too_many_in_a_row():
    config, bad = Config(train=TrainConfig(max_bad_steps=3)), {"train/skipped_steps": 2.0}
    assert stop_if_steps_fail(config, 4, {"train/skipped_steps": 0.0}, bad_steps=3) == 0
    assert stop_if_steps_fail(config, 4, {}, bad_steps=0) == 0
    assert stop_if_steps_fail(config, 4, bad, bad_steps=1) == 3
    with pytest.raises(ValueError, match="iteration 5: 4 optimizer steps in a row .* train.max_bad_steps=3"):
        stop_if_steps_fail(config, 5, {"train/skipped_steps": 1.0, "critic/skipped_steps": 1.0}, bad_steps=2)


def test_a_run_that_goes_on_counts_the_skipped_steps_before():
    lines = [{"train/skipped_steps": count} for count in (5.0, 0.0, 2.0, 1.0)]
    assert bad_steps_so_far(lines) == 3
    assert bad_steps_so_far(lines[:2]) == bad_steps_so_far([]) == 0


@pytest.mark.parametrize("metric", ["train/skipped_steps", "critic/skipped_steps"])
def test_all_samples_of_a_skipped_step_are_kept_though_none_is_asked_for(tmp_path, metric):
    config = Config(run=RunConfig(name="run", iterations=4), log=LogConfig(samples=0, timelines=[]))
    folder = RunFolder(tmp_path, resumed=False)
    (tmp_path / "samples").mkdir()
    rows = simulated_rows(random.Random(0), 0, T, ("math",), 0.5, hostile=False)
    log = Logbook(config, folder, Console(4, quiet=True), Tracker(lambda *_: None, lambda: None), T)
    for iteration, skipped in enumerate([0.0, 1.0]):
        record = {"rows": rows, "spans": [], "metrics": {metric: skipped}}
        log.write(iteration, [record])
        kept = [line["sample_id"] for line in read_lines(folder.samples(iteration))]
        assert sorted(kept) == (sorted(row["sample_id"] for row in rows) if skipped else [])


def test_an_engine_or_scorer_that_fails_at_most_samples_stops_the_run():
    config = Config(grade=GradeConfig(max_failed_fraction=0.5))
    fine = {"finish_reason": "stop", "generate_error": "", "score_error": ""}
    not_made = {"finish_reason": "failed", "generate_error": "ValueError: too long", "score_error": ""}
    not_scored = fine | {"score_error": "OutOfMemoryError"}
    stop_if_most_fail(config, 0, [fine] * 5 + [not_made] * 5)
    stop_if_most_fail(config, 0, [fine] * 5 + [not_scored] * 5)
    with pytest.raises(ValueError, match="iteration 1: generation failed for 6 of 10 .* error: ValueError: too long"):
        stop_if_most_fail(config, 1, [fine] * 4 + [not_made] * 6)
    with pytest.raises(ValueError, match="iteration 1: scoring failed for 6 of 10 samples.* error: OutOfMemoryError"):
        stop_if_most_fail(config, 1, [fine] * 4 + [not_scored] * 6)


def test_a_last_checkpoint_that_could_not_be_written_is_an_error_of_the_run():
    stop_if_unsaved([{"unsaved": ""}, {"unsaved": ""}])
    with pytest.raises(ValueError, match="its last checkpoint step_9 could not .*No space left.* run.resume=auto"):
        stop_if_unsaved(
            [{"unsaved": "checkpoint step_9 could not be written: No space left on device"}, {"unsaved": ""}]
        )
