"""Metrics of hand-made iterations, with the values worked out in the comments."""

import json
import math

import pytest

from raypipe.config_checks import RESERVED_GRADER_NAMES
from raypipe.metrics import MAX_NAMED_VALUES, METRICS, grader_metrics, iteration_metrics, legend
from raypipe.timeline import summarize

T = 1_700_000_000.0


def grade(status: str = "ok", score: float | None = 1.0, grader: str = "math", **values) -> dict:
    return {"grader": grader, "status": status, "score": score, "weight": 1.0, "values": values, "error": ""}


def row(
    group: int,
    member: int,
    score: float = 1.0,
    status: str = "ok",
    tokens: int = 4,
    finish: str = "stop",
    lag: float = 0.1,
    grades: list[dict] | None = None,
    purpose: str = "train",
    versions: list[int] | None = None,
) -> dict:
    """Generated in [T, T + 10], graded for 0.5 s after `lag`."""
    return {
        "sample_id": f"3/{group}/{member}",
        "iteration": 3,
        "group_id": group,
        "member": member,
        "purpose": purpose,
        "response_ids": list(range(tokens)),
        "weight_versions": [3] * tokens if versions is None else versions,
        "finish_reason": finish,
        "engine": "engine-0",
        "generate_start": T,
        "generate_end": T + 10,
        "score": score if status == "ok" else math.nan,
        "grade_status": status,
        "grades": json.dumps([grade(status, score if status == "ok" else None)] if grades is None else grades),
        "grader": "grader-0",
        "grade_start": T + 10 + lag,
        "grade_end": T + 10.5 + lag,
    }


def metrics_of(rows, learner=None, version=3, spans=()):
    return iteration_metrics(3, rows, learner or {}, version, summarize(rows, spans, window=(T, T + 20)))


def test_reward_counts_ok_samples_only():
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 0, 0.5), row(1, 1, status="timeout"), row(1, 2, status="abstain")]
    found = metrics_of(rows)
    assert found["reward/mean"] == pytest.approx(0.5)
    assert found["reward/std"] == pytest.approx(math.sqrt((0.25 + 0.25 + 0) / 3))
    assert found["reward/math"] == pytest.approx(0.5)
    assert {name: found[f"grade/{name}_frac"] for name in ("ok", "abstain", "timeout", "error", "crash")} == {
        "ok": 0.6, "abstain": 0.2, "timeout": 0.2, "error": 0.0, "crash": 0.0,
    }  # fmt: skip
    assert found["grade/math/ok"] == 3 and found["grade/math/timeout"] == 1
    assert found["iteration"] == 3 and found["samples"] == 5


def test_samples_that_were_cut_off_are_counted_and_nothing_else():
    kept = [row(0, 0, 1.0), row(0, 1, 0.0)]
    cut = [row(4, i, status="abstain", finish="surplus", tokens=900 * i, lag=math.nan, grades=[]) for i in range(2)]
    found = metrics_of(kept + cut)
    assert found == metrics_of(kept) | {"group/surplus": 1}


def test_each_grader_has_its_raw_mean_its_named_values_and_its_statuses():
    rows = [
        row(0, 0, grades=[grade(score=1.0, depth=2), grade(score=0.2, grader="a/b")]),
        row(0, 1, grades=[grade(score=0.0, depth=4, ok=True, note="text", bad=math.inf), grade("crash", None, "a/b")]),
    ]
    found = grader_metrics(rows)
    assert found == {
        "reward/math": 0.5,
        "reward/math/depth": 3.0,
        "reward/math/ok": 1.0,
        "reward/a_b": pytest.approx(0.2),
        "grade/math/ok": 2,
        "grade/a_b/ok": 1,
        "grade/a_b/crash": 1,
    }


def test_a_grader_that_makes_up_a_name_a_sample_does_not_flood_the_line():
    rows = [row(0, i, grades=[grade(score=1.0, common=1.0, **{f"x{i}": 1.0})]) for i in range(500)]
    found = grader_metrics(rows)
    assert len(found) == MAX_NAMED_VALUES + 2 and found["reward/math/common"] == 1.0


def test_a_grader_does_not_write_over_a_canonical_name():
    for name in RESERVED_GRADER_NAMES:
        rows = [
            row(0, 0, 0.25, grades=[grade(score=9.0, grader=name)]),
            row(0, 1, 0.75),
            row(1, 0, 0.5, purpose="heldout"),
        ]
        found = metrics_of(rows)
        assert found["reward/mean"] == 0.5 and found["reward/std"] == 0.25
        assert found["reward/heldout_mean"] == 0.5 and found["reward/heldout_samples"] == 1


def test_heldout_samples_count_for_heldout_metrics_only():
    rows = [
        row(0, 0, 1.0, tokens=4),
        row(0, 1, 1.0, purpose="heldout", tokens=100, lag=9.0),
        row(0, 2, 0.0, purpose="heldout"),
    ]
    rows.append(row(0, 3, status="error", purpose="heldout"))
    found = metrics_of(rows)
    assert found["reward/heldout_mean"] == 0.5 and found["reward/heldout_samples"] == 2
    assert found["reward/mean"] == 1.0 and found["samples"] == 1
    assert found["response/length_max"] == 4 and found["grade/error_frac"] == 0
    assert found["lag/graded_p95_s"] == pytest.approx(0.1)


def test_response_lengths_and_ends():
    rows = [row(0, 0, tokens=2), row(0, 1, tokens=6, finish="length"), row(1, 0, tokens=4)]
    rows.append(row(1, 1, tokens=0, finish="failed", status="error"))
    found = metrics_of(rows)
    assert found["response/length_mean"] == 4 and found["response/length_max"] == 6
    assert found["response/truncated_frac"] == pytest.approx(1 / 3)
    assert found["response/failed_frac"] == 0.25


def test_groups_without_a_gradient():
    """Group 0 is all equal, group 1 differs, group 2 has one score only and cannot tell."""
    rows = [row(0, 0, 1.0), row(0, 1, 1.0), row(1, 0, 0.0), row(1, 1, 1.0), row(2, 0, 1.0), row(2, 1, status="crash")]
    assert metrics_of(rows)["group/all_equal_frac"] == 0.5


def test_lag_percentiles_are_of_generated_samples_and_interpolated():
    rows = [row(0, i, lag=float(i)) for i in range(5)] + [row(1, 0, finish="failed", status="error", lag=100.0)]
    found = metrics_of(rows)
    assert found["lag/graded_p50_s"] == pytest.approx(2.0)
    assert found["lag/graded_p95_s"] == pytest.approx(3.8)  # 0.95 * 4 = 3.8 between the 4th and the 5th
    assert found["grade/seconds_mean"] == pytest.approx(0.5)


def test_staleness_is_a_mean_over_tokens():
    rows = [row(0, 0, tokens=3, versions=[3, 3, 4]), row(0, 1, tokens=1, versions=[1]), row(0, 2, tokens=0)]
    found = metrics_of(rows, version=4)
    assert found["staleness/mean"] == pytest.approx((1 + 1 + 0 + 3) / 4)
    assert found["staleness/max"] == 3


def test_time_idle_and_throughput():
    spans = [{"lane": "learner-0", "name": "update weights", "start": T + 15, "end": T + 20}]
    found = metrics_of([row(0, 0, tokens=30), row(0, 1, tokens=10)], spans=spans)
    assert found["tokens_per_s"] == pytest.approx(40 / 20)
    assert found["time/iteration_s"] == 20
    assert found["time/generate_s"] == pytest.approx(10) and found["time/grade_s"] == pytest.approx(0.5)
    assert found["time/update_weights_s"] == pytest.approx(5)
    assert found["idle/generate"] == pytest.approx(0.5) and found["idle/learner"] == pytest.approx(0.75)
    assert found["efficiency"] == pytest.approx(0.5)
    assert found["overlap/first_grade_lead_s"] == pytest.approx(-0.1)
    assert found["overlap/grading_hidden_frac"] == 0


def test_learner_metrics_pass_through_and_what_has_no_value_is_left_out():
    learner = {"policy/kl": 0.01, "grad_norm": math.nan, "mismatch/max": math.inf, "policy/entropy": None, "lr": 0}
    found = metrics_of([row(0, 0, status="crash")], learner)
    assert found["policy/kl"] == 0.01 and found["lr"] == 0
    absent = ("grad_norm", "mismatch/max", "policy/entropy", "reward/mean", "reward/std", "reward/math",
              "reward/heldout_mean", "reward/heldout_samples", "group/all_equal_frac")  # fmt: skip
    assert not set(absent) & set(found)
    assert all(math.isfinite(value) for value in found.values())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_iteration_of_no_training_samples_has_no_made_up_values():
    found = metrics_of([row(0, 0, 0.5, purpose="heldout")])
    assert found["samples"] == 0 and found["reward/heldout_mean"] == 0.5
    assert not [name for name in found if name.startswith(("response/", "grade/", "lag/", "staleness/", "group/"))]


def test_every_name_has_a_legend():
    learner = {f"policy/{name}": 1.0 for name in ("kl", "clip_frac", "entropy", "dual_clip_frac")}
    learner |= {f"mismatch/{name}": 1.0 for name in ("kl", "mean", "max")}
    learner |= {"lr": 1.0, "grad_norm": 1.0, "train/skipped_steps": 0.0}
    spans = [{"lane": "learner-0", "name": name, "start": T, "end": T + 1} for name in ("train", "update weights")]
    rows = [row(g, m, score=m, grades=[grade(score=1.0, depth=1)], tokens=3) for g in range(2) for m in range(2)]
    rows += [row(3, 0, purpose="heldout")]
    found = metrics_of(rows, learner, spans=spans)
    assert [name for name in found if legend(name) is None] == []
    assert legend("reward/mean") == METRICS["reward/mean"]
    assert legend("reward/math") == METRICS["reward/<grader>"]
    assert legend("reward/math/depth") == METRICS["reward/<grader>/<value>"]
    assert legend("grade/timeout_frac") == METRICS["grade/<status>_frac"]
    assert legend("time/update_weights_s") == METRICS["time/<phase>_s"]
    assert legend("nonsense") is None and legend("reward/") is None and legend("rewardXmean") is None


def test_every_legend_that_names_one_metric_is_produced():
    """A name that nothing writes has no place in the legend."""
    of_learner = (
        "policy",
        "critic",
        "ref",
        "train",
        "mismatch",
        "grad_norm",
        "lr",
        "checkpoint",
    )  # see their own tests
    learner = {name: 1.0 for name in METRICS if name.split("/")[0] in of_learner}
    rows = [row(g, m, score=m) | {"reserve": g - 1, "score_error": ""} for g in range(2) for m in range(2)] + [
        row(3, 0, purpose="heldout"),
        row(4, 0, status="abstain", finish="surplus"),
        row(5, 0) | {"iteration": 2},
    ]
    found = metrics_of(rows, learner)
    assert found["group/carried"] == found["group/surplus"] == 1
    assert [name for name in METRICS if "<" not in name and name not in found] == []
