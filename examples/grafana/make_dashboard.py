"""Writes raypipe.json beside it: a Grafana dashboard of raypipe's metrics, as Ray exports them to Prometheus.

    python examples/grafana/make_dashboard.py

Import the JSON in Grafana (Dashboards, New, Import) with a Prometheus data source that scrapes Ray; see Ray's page
"Collecting and monitoring metrics" for the scrape config, which Ray writes to its session folder.
"""

import json
import re
from pathlib import Path

from raypipe.live import LIVE, live_name

# Title, unit of Grafana, and the metrics of a panel: legend -> name in metrics.jsonl.
NOT_OK = ("abstain", "error", "timeout", "crash")
PANELS = [
    ("Reward", "none", {"training": "reward/mean", "held out": "reward/heldout_mean"}),
    (
        "KL per token",
        "none",
        {"of the update": "policy/kl", "engines to learner": "mismatch/kl", "reference": "ref/kl"},
    ),
    ("Entropy per token", "none", {"entropy": "policy/entropy"}),
    ("Gradient norm", "none", {"norm": "grad_norm"}),
    ("Clipped", "percentunit", {"tokens": "policy/clip_frac"}),
    ("Response length", "none", {"mean": "response/length_mean", "longest": "response/length_max"}),
    ("Truncated, failed", "percentunit", {"truncated": "response/truncated_frac", "failed": "response/failed_frac"}),
    ("Groups of one score", "percentunit", {"no gradient": "group/all_equal_frac"}),
    ("Grade statuses but ok", "percentunit", {name: f"grade/{name}_frac" for name in NOT_OK}),
    ("From finished to graded", "s", {"p50": "lag/graded_p50_s", "p95": "lag/graded_p95_s"}),
    ("Grading a sample", "s", {"mean": "grade/seconds_mean"}),
    ("Idle", "percentunit", {name: f"idle/{name}" for name in ("generate", "grade", "score", "learner")}),
    ("Efficiency", "percentunit", {"busiest resource": "efficiency", "grading hidden": "overlap/grading_hidden_frac"}),
    ("Tokens per second", "none", {"response tokens": "tokens_per_s"}),
    ("An iteration", "s", {"wall time": "time/iteration_s"}),
    ("Staleness", "none", {"mean": "staleness/mean", "largest": "staleness/max"}),
]
# The same of live metrics (raypipe/live.py), as PromQL of their names; RUN is the chosen run.
LIVE_PANELS = [
    ("Now: requests", "none", {"run": "sum by (run) (generating)", "wait for weights": "sum by (run) (at_gate)"}),
    ("Now: tokens per second", "none", {"{{actor}}": "rate(tokens_total[1m])"}),
    ("Now: weight version", "none", {"{{actor}}": "max by (actor) (weight_version)"}),
    ("Now: weight update", "s", {"{{actor}}": "max by (actor) (weight_update_seconds)"}),
    ("Now: in grading", "none", {"without a score": "sum by (run) (grading)", "queued": "sum by (run) (grade_queued)"}),
    (
        "Now: from finished to graded",
        "s",
        {
            "p50": "histogram_quantile(0.5, sum by (le) (rate(grade_lag_seconds_bucket[1m])))",
            "p95": "histogram_quantile(0.95, sum by (le) (rate(grade_lag_seconds_bucket[1m])))",
        },
    ),
    (
        "Now: a grader's batch",
        "none",
        {"{{grader}}": "rate(grade_call_samples_total[1m]) / rate(grade_calls_total[1m])"},
    ),
    (
        "Now: a sample in a grader",
        "s",
        {"{{grader}}": "rate(grade_call_seconds_total[1m]) / rate(grade_call_samples_total[1m])"},
    ),
    ("Now: grades a second", "none", {"{{grader}} {{status}}": "rate(grade_statuses_total[1m])"}),
]
COLUMNS, HEIGHT = 3, 8


def iteration_query(name: str) -> str:
    """PromQL of a metric of metrics.jsonl."""
    return f'max by (run) (ray_raypipe_{name.replace("/", "_")}{{run=~"$run"}})'


def live_query(expression: str) -> str:
    """PromQL with each live metric's name as Prometheus has it, of the chosen run."""
    names = "|".join(sorted(LIVE, key=len, reverse=True))
    pattern = rf"(?<![\w{{])({names})(_total|_bucket)?(?=[\[) ]|$)(?! \()"
    return re.sub(pattern, lambda m: f'ray_{live_name(m[1])}{m[2] or ""}{{run=~"$run"}}', expression)


def panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict:
    width = 24 // COLUMNS
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": number % COLUMNS * width, "y": number // COLUMNS * HEIGHT, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 2, "spanNulls": True}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": query,
                "legendFormat": f"{{{{run}}}} {label}",
            }
            for i, (label, query) in enumerate(queries.items())
        ],
    }


def dashboard() -> dict:
    live = [(title, unit, {k: live_query(v) for k, v in of.items()}) for title, unit, of in LIVE_PANELS]
    by_iteration = [(title, unit, {k: iteration_query(v) for k, v in of.items()}) for title, unit, of in PANELS]
    panels = live + by_iteration
    runs = {
        "name": "run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(ray_raypipe_iteration, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "raypipe",
        "uid": "raypipe",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, runs]},
        "panels": [panel(i, *entry) for i, entry in enumerate(panels)],
    }


if __name__ == "__main__":
    path = Path(__file__).with_name("raypipe.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")
    print(f"wrote {path}")
