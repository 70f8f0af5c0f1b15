"""The metrics line of an iteration, and the legend of every name in it.

In: an iteration's rows (columns of rows.py), the learner's own metrics and the timeline's `Summary`. Out: a flat dict
of floats. Decision: a metric without a value (no held-out prompts, nothing graded) is left out, never a made-up 0, and
whatever is not finite has no value. Means are over samples unless the legend says otherwise.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.rows import GRADE_STATUSES
from raypipe.timeline import Summary

Row = Mapping[str, Any]

# Name -> (unit, meaning). <x> stands for any text without a slash. Training samples only, except reward/heldout_*.
METRICS = {
    "iteration": ("", "number of the iteration"),
    "samples": ("", "training samples"),
    "reward/mean": ("score", "mean score of the samples graded ok"),
    "reward/std": ("score", "standard deviation of these scores"),
    "reward/<grader>": ("score", "mean raw score of one grader, unweighted, over the samples it graded ok"),
    "reward/<grader>/<value>": ("", "mean of a named value that a grader returned beside its score"),
    "reward/heldout_mean": ("score", "mean score of the held-out samples graded ok"),
    "reward/heldout_samples": ("", "held-out samples graded ok"),
    "response/length_mean": ("tokens", "response length, samples that failed to generate left out"),
    "response/length_max": ("tokens", "longest response"),
    "response/truncated_frac": ("fraction", "responses cut at rollout.max_response_length"),
    "response/failed_frac": ("fraction", "samples that no engine could generate"),
    "grade/<status>_frac": ("fraction", "samples with this grade status: ok, abstain, error, timeout or crash"),
    "grade/<grader>/<status>": ("samples", "how often one grader ended with this status"),
    "grade/seconds_mean": ("s", "from a grade's start to its end"),
    "score/failed_frac": ("fraction", "samples that no scorer could score, which are not trained on"),
    "group/all_equal_frac": ("fraction", "prompts whose samples all have one score and so give no GRPO gradient"),
    "group/from_reserve": (
        "prompts",
        "prompts of the reserve among them, see rollout.reserve_prompts and rollout.overprovision",
    ),
    "group/carried": ("prompts", "prompts whose samples began in an iteration before, see rollout.carry_over"),
    "group/surplus": ("prompts", "prompts that were cut off, enough others being graded, see rollout.overprovision"),
    "train/prompts": ("prompts", "prompts that were trained on"),
    "lag/graded_p50_s": ("s", "median time from a sample's end of generation to its grade's start"),
    "lag/graded_p95_s": ("s", "95th percentile of that time"),
    "staleness/mean": ("versions", "learner's weight version minus the one that made the token, mean over tokens"),
    "staleness/max": ("versions", "the largest such difference"),
    "tokens_per_s": ("tokens/s", "response tokens over the iteration's wall time"),
    "time/iteration_s": ("s", "the iteration's wall time"),
    "time/<phase>_s": ("s", "time in which any engine, grader, rank or the driver was in this phase"),
    "idle/<stage>": ("fraction", "1 - busy time / wall time, mean over the stage's engines, grader slots or ranks"),
    "efficiency": ("fraction", "busy time of the busiest engine, grader slot or rank / wall time"),
    "overlap/grading_hidden_frac": ("fraction", "part of the time spent in grading that lay under generation"),
    "overlap/first_grade_lead_s": (
        "s",
        "from the first grade's start to the last generation's end; below 0: no overlap",
    ),
    "policy/kl": ("nats", "KL of the sampling policy from the updated one, mean over tokens"),
    "policy/clip_frac": ("fraction", "tokens whose ratio was clipped"),
    "policy/entropy": ("nats", "entropy of the policy, mean over tokens"),
    "policy/<name>": ("", "other values of the policy loss, mean over tokens"),
    "ref/kl": ("nats", "KL of the sampling policy from the reference by algorithm.kl_estimator, mean over tokens"),
    "ref/kl_coef": ("", "weight of that KL, as steered towards algorithm.kl_target"),
    "critic/explained_variance": ("fraction", "1 - Var(returns - values) / Var(returns): 1 perfect, 0 a constant"),
    "critic/loss": ("", "value loss, mean over tokens"),
    "critic/value": ("score", "value of the state before a token, mean over tokens"),
    "critic/clip_frac": ("fraction", "values held back by critic.value_clip"),
    "critic/<name>": ("", "as lr, grad_norm and train/skipped_steps, of the critic"),
    "mismatch/mean": ("nats", "absolute difference of learner's and engines' log-probs on the same weights"),
    "mismatch/max": ("nats", "the largest such difference of a token"),
    "mismatch/kl": ("nats", "KL of the engines' policy from the learner's on the same weights, mean over tokens"),
    "mismatch/<name>": ("", "other measures of learner against engines"),
    "train/padding_frac": ("fraction", "tokens of the forward passes that were padding"),
    "train/<name>": ("", "what the learner counted, e.g. skipped_steps: gradients that were not finite"),
    "memory/<kind>_gib": (
        "GiB",
        "resident and not shared, all processes of a kind: driver, engine, engine_core, scorer, learner, grader_host, "
        "grader, plans (plan server, grading queue), stages (of the plans at work), ray (all else of Ray); "
        "object_store: its objects",
    ),
    "memory/<kind>_processes": ("processes", "how many of a kind there were"),
    "checkpoint/write_s": ("s", "from a checkpoint's copy in memory to its being whole on disk; training goes on"),
    "checkpoint/failures": ("checkpoints", "those that could not be written since the last iteration"),
    "grad_norm": ("", "norm of the gradient before clipping, mean over optimizer steps"),
    "lr": ("", "learning rate"),
}
# A grader that makes up a name a sample must not make a metric a sample; the rarest names are left out.
MAX_NAMED_VALUES = 64


def legend(name: str) -> tuple[str, str] | None:
    """(unit, meaning) of a metric's name; None for one that has no entry in METRICS."""
    if name in METRICS:
        return METRICS[name]
    for pattern, entry in METRICS.items():
        regex = "".join(
            "[^/]+" if part.startswith("<") else re.escape(part) for part in re.split("(<[a-z]+>)", pattern)
        )
        if re.fullmatch(regex, name):
            return entry
    return None


def iteration_metrics(
    iteration: int, rows: Iterable[Row], learner: Mapping[str, float | None], learner_version: int, summary: Summary
) -> dict[str, float]:
    """The metrics line of one iteration.

    Args:
        iteration: its number.
        rows: its rows of any purpose; those of purpose `heldout` count for reward/heldout_* only.
        learner: the learner's metrics by their canonical names, means over all ranks; passed through.
        learner_version: the weight version that the learner had when it began to train on these rows.
        summary: of the iteration's timeline.
    """
    everything = list(rows)
    rows = [row for row in everything if row["finish_reason"] != "surplus"]
    train = [row for row in rows if row["purpose"] == "train"]
    heldout = [row["score"] for row in rows if row["purpose"] == "heldout" and row["grade_status"] == "ok"]
    found: dict[str, float | None] = {
        **grader_metrics(train),
        **reward_metrics(train),
        **response_metrics(train),
        **grade_metrics(train),
        "score/failed_frac": mean([bool(row["score_error"]) for row in train if "score_error" in row]),
        **staleness_metrics(train, learner_version),
        **time_metrics(rows, summary),
        **learner,
        "group/carried": len({row["group_id"] for row in train if row["iteration"] < iteration}) or None,
        "group/surplus": len({row["group_id"] for row in everything if row["finish_reason"] == "surplus"}) or None,
        "reward/heldout_mean": mean(heldout),
        "reward/heldout_samples": len(heldout) or None,
    }
    values = {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
    return {"iteration": iteration, "samples": len(train), **values}


def reward_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    scored = [row for row in rows if row["grade_status"] == "ok"]
    scores = [row["score"] for row in scored]
    groups: dict[int, list[float]] = {}
    for row in scored:
        groups.setdefault(row["group_id"], []).append(row["score"])
    compared = [min(group) == max(group) for group in groups.values() if len(group) > 1]
    return {
        "reward/mean": mean(scores),
        "reward/std": float(np.std(scores)) if len(scores) > 1 else None,
        "group/all_equal_frac": mean(compared),
        "group/from_reserve": len({row["group_id"] for row in rows if row.get("reserve", -1) >= 0}) or None,
    }


def response_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    finished = [row for row in rows if row["finish_reason"] != "failed"]
    lengths = [len(row["response_ids"]) for row in finished]
    return {
        "response/length_mean": mean(lengths),
        "response/length_max": max(lengths, default=None),
        "response/truncated_frac": mean([row["finish_reason"] == "length" for row in finished]),
        "response/failed_frac": mean([row["finish_reason"] == "failed" for row in rows]),
    }


def grade_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    """Statuses, seconds and lag. Samples that were not generated were not graded, so they have neither time nor lag."""
    graded = [row for row in rows if row["finish_reason"] != "failed"]
    lags = np.array([row["grade_start"] - row["generate_end"] for row in graded])
    lags = lags[np.isfinite(lags)]
    p50, p95 = np.percentile(lags, [50, 95]) if lags.size else (None, None)
    return {
        **{f"grade/{status}_frac": mean([row["grade_status"] == status for row in rows]) for status in GRADE_STATUSES},
        "grade/seconds_mean": mean([row["grade_end"] - row["grade_start"] for row in graded]),
        "lag/graded_p50_s": p50,
        "lag/graded_p95_s": p95,
    }


def grader_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    """Each grader's mean score, mean named values and count of statuses, from the `grades` column."""
    scores: dict[str, list[float]] = {}
    named: dict[str, list[float]] = {}
    statuses: Counter[str] = Counter()
    for row in rows:
        for entry in json.loads(row["grades"] or "[]"):
            grader = entry["grader"].replace("/", "_")
            statuses[f"grade/{grader}/{entry['status']}"] += 1
            if entry["status"] == "ok":
                scores.setdefault(f"reward/{grader}", []).append(entry["score"])
            for name, value in entry["values"].items():
                if isinstance(value, int | float) and math.isfinite(value):
                    named.setdefault(f"reward/{grader}/{name.replace('/', '_')}", []).append(value)
    often = sorted(named, key=lambda name: -len(named[name]))[:MAX_NAMED_VALUES]
    means = {name: mean(values) for name, values in scores.items()} | {name: mean(named[name]) for name in often}
    return {**means, **statuses}


def staleness_metrics(rows: Sequence[Row], learner_version: int) -> dict[str, float | None]:
    versions = [np.asarray(row["weight_versions"]) for row in rows if len(row["weight_versions"])]
    made = np.concatenate(versions) if versions else np.empty(0, int)
    made = made[made >= 0]  # saved rollouts are of no version of this run
    if not made.size:
        return {}
    behind = learner_version - made
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def time_metrics(rows: Sequence[Row], summary: Summary) -> dict[str, float | None]:
    return {
        "tokens_per_s": sum(len(row["response_ids"]) for row in rows) / summary.wall_s,
        "time/iteration_s": summary.wall_s,
        **{f"time/{name.replace(' ', '_').replace('/', '_')}_s": took for name, took in summary.phases.items()},
        **{f"idle/{stage.lower()}": fraction for stage, fraction in summary.idle.items()},
        "efficiency": summary.efficiency,
        "overlap/grading_hidden_frac": summary.overlap,
        "overlap/first_grade_lead_s": summary.first_grade_lead_s,
    }


def mean(values: Sequence[float]) -> float | None:
    """None for nothing."""
    return float(np.mean(values)) if values else None
