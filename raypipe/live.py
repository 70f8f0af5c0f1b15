"""Live metrics: what engines and the grade dispatcher are doing now, once a second, for Prometheus by way of Ray.

In: what such an actor says of itself (`stats()`). Out: gauges and counters that Ray exports beside its own, as
ray_raypipe_live_<name> with the labels run and actor; examples/grafana/raypipe.json shows them. Decision: nothing is
measured twice. The same counts are kept anyway; here they are read once a second, so what an actor does for a sample
costs the same with or without.

metrics.jsonl has an iteration's numbers when it is over; these say why it is not over yet.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

EVERY_S = 1.0
# Seconds: from "at once" to a grader that holds up the run.
LAG_BOUNDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]

# Name -> (kind, unit, meaning). A counter's name in Prometheus ends in _total.
LIVE = {
    "generating": ("gauge", "requests", "requests that run in an engine"),
    "at_gate": ("gauge", "requests", "requests that wait in an engine for new weights"),
    "weight_version": ("gauge", "versions", "weights that an engine has: optimizer iterations behind them"),
    "weight_update_seconds": ("gauge", "s", "last weight update of an engine, from closed gate to open gate"),
    "tokens": ("counter", "tokens", "response tokens that an engine has made; their rate is tokens per second"),
    "engine_busy_seconds": ("counter", "s", "time in which an engine had a request to run"),
    "grading": ("gauge", "samples", "samples that have been handed to grading and have no score yet"),
    "grade_queued": ("gauge", "samples", "of them those that wait for a free grader process, once for each grader"),
    "grade_running": ("gauge", "samples", "of them those in a grader's call"),
    "grade_statuses": ("counter", "samples", "grades by grader and status"),
    "grade_calls": ("counter", "calls", "calls of a grader"),
    "grade_call_samples": ("counter", "samples", "samples in these calls; over grade_calls: the batch size"),
    "grade_call_seconds": ("counter", "s", "time in these calls"),
    "grade_kills": ("counter", "processes", "grader processes that were killed"),
    "grade_lag_seconds": ("histogram", "s", "from a sample's arrival in grading to the start of its grade"),
}
KINDS: dict[str, Any] = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}


def live_name(name: str) -> str:
    """A metric's name in Prometheus, but for the ray_ that Ray puts before it."""
    return f"raypipe_live_{name}"


class Live:
    """The live metrics of the actor that makes it; without a name, as in tests of its parts, they go nowhere."""

    def __init__(self) -> None:
        name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
        run, _, actor = (name or "").rpartition("/")
        self.tags = {"run": run, "actor": actor}
        self.metrics: dict[str, Any] = {}
        self.before: dict[tuple[str, ...], float] = {}

    def _metric(self, name: str, labels: Mapping[str, str]) -> Any:
        if name not in self.metrics:
            kind, unit, meaning = LIVE[name]
            keys = ("run", "actor", *labels)
            more = {"boundaries": LAG_BOUNDS} if kind == "histogram" else {}
            self.metrics[name] = KINDS[kind](live_name(name), description=f"{meaning} ({unit})", tag_keys=keys, **more)
        return self.metrics[name]

    def set(self, name: str, value: float, **labels: str) -> None:
        """A gauge's value, or how far a counter has come since the actor began."""
        if not self.tags["run"]:
            return
        metric = self._metric(name, labels)
        if LIVE[name][0] == "gauge":
            metric.set(value, self.tags | labels)
        else:
            key = (name, *labels.values())
            step = value - self.before.get(key, 0.0)
            self.before[key] = value
            if step > 0:
                metric.inc(step, self.tags | labels)

    def observe(self, name: str, value: float) -> None:
        """One value of a histogram."""
        if self.tags["run"]:
            self._metric(name, {}).observe(value, self.tags)

    async def report(self, stats: Callable[[], dict[str, Any]], tell: Callable[["Live", dict[str, Any]], None]) -> None:
        """Tells what `stats()` says once a second, until it is cancelled."""
        while True:
            tell(self, stats())
            await asyncio.sleep(EVERY_S)


def engine_metrics(live: Live, stats: Mapping[str, Any]) -> None:
    """Of `VLLMEngine.stats` or `ScriptedEngine.stats`."""
    names = {
        "generating": "in_flight",
        "at_gate": "waiting",
        "weight_version": "version",
        "weight_update_seconds": "update_seconds",
        "tokens": "generated_tokens",
        "engine_busy_seconds": "busy_seconds",
    }
    for name, of in names.items():
        if stats.get(of) is not None:
            live.set(name, stats[of])


def grading_metrics(live: Live, stats: Mapping[str, Any]) -> None:
    """Of `GradeQueue.stats`."""
    live.set("grading", stats["received"] - stats["graded"])
    live.set("grade_queued", stats["queued"])
    live.set("grade_running", stats["running"])
    live.set("grade_kills", stats["kills"])
    for grader, lane in stats["graders"].items():
        for status, count in lane["statuses"].items():
            live.set("grade_statuses", count, grader=grader, status=status)
        live.set("grade_calls", sum(lane["batches"].values()), grader=grader)
        live.set("grade_call_samples", sum(size * calls for size, calls in lane["batches"].items()), grader=grader)
        live.set("grade_call_seconds", lane["seconds"], grader=grader)
