"""The logbook: what is written down of each iteration, and what in it ends the run.

In: the ranks' records of an iteration. Out: its line of metrics and of the timeline, its samples, and in some
iterations its picture and trace, in the run folder and for the trackers; a line on the console, with an alarm where
learner and engines disagree. Decision: an iteration is written down whole before it may end the run, so that there is
something to look into.
"""

import functools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from raypipe.config import Config
from raypipe.console import Console
from raypipe.grading.results import FAILURES
from raypipe.loggers import Tracker
from raypipe.metrics import iteration_metrics
from raypipe.run_folder import RunFolder
from raypipe.samples import pick, write_samples
from raypipe.spans import collect
from raypipe.timeline import summarize
from raypipe.timeline_plot import draw
from raypipe.timeline_trace import write_trace

# Samples of one grader below which its failures may be those of a few hard prompts.
ENOUGH_TO_TELL = 32


@dataclass
class Logbook:
    """Args:
    config: the run's.
    folder: of the run.
    console: what a person watches.
    tracker: the loggers of log.loggers.
    end: when the iteration before ended, in seconds since the epoch; 0 before the first.
    bad_steps: optimizer steps in a row that were skipped.
    """

    config: Config
    folder: RunFolder
    console: Console
    tracker: Tracker
    end: float = 0.0
    bad_steps: int = 0

    def write(self, iteration: int, records: list[dict[str, Any]]) -> dict[str, float]:
        """Writes an iteration down, and returns its metrics. Raises ValueError when too much of it failed for the run
        to go on.

        An iteration lasts from the end of the one before to the end of its weight update, so that their wall times add
        up to the run's.
        """
        config, folder = self.config, self.folder
        rows = [row for record in records for row in record["rows"]]
        spans = [span for record in records for span in record["spans"]]
        if not rows:
            return {}
        found = collect(rows, spans)
        end = max(span.end for span in found)
        # Held-out samples may be done while the learner still writes a checkpoint, within the iteration before.
        summary = summarize(rows, spans, (self.end if 0 < self.end < end else found[0].start, end))
        metrics = iteration_metrics(iteration, rows, records[0]["metrics"], iteration, summary)
        self.end = max(self.end, end)
        folder.append_metrics(metrics)
        folder.append_stages(iteration, summary)
        # What a step that was skipped has seen is all kept, to be looked into.
        write_samples(folder.samples(iteration), rows, len(rows) if skipped_steps(metrics) else config.log.samples)
        self.tracker.log(iteration, metrics, pick(rows, config.log.samples))
        self.console.end_iteration(metrics)
        if iteration in config.log.timelines or iteration == config.run.iterations - 1:
            draw(folder.timeline(iteration, ".png"), found, summary, f"{config.run.name}, iteration {iteration}")
            write_trace(folder.timeline(iteration, ".json"), found)
            self.console.note(summary.advice)
        if metrics.get("mismatch/kl", 0.0) > config.engine.max_mismatch_kl:
            self.console.warn(
                f"iteration {iteration}: learner and engines disagree: mismatch/kl={metrics['mismatch/kl']:.3g} nats a "
                f"token is over engine.max_mismatch_kl={config.engine.max_mismatch_kl:g}; an engine may hold stale "
                "weights, or compute in another dtype than the learner"
            )
        stop_if_most_fail(config, iteration, rows)
        stop_if_grading_fails(config, iteration, rows)
        self.bad_steps = stop_if_steps_fail(config, iteration, metrics, self.bad_steps)
        return metrics


def skipped_steps(metrics: dict[str, float]) -> int:
    return int(metrics.get("train/skipped_steps", 0) + metrics.get("critic/skipped_steps", 0))


def in_a_row(bad_steps: int, metrics: dict[str, float]) -> int:
    """Steps that were skipped in a row up to an iteration, `bad_steps` of them before it."""
    skipped = skipped_steps(metrics)
    return bad_steps + skipped if skipped else 0


def bad_steps_so_far(lines: list[dict[str, float]]) -> int:
    """Steps that were skipped in a row at the end of a run's metrics."""
    return functools.reduce(in_a_row, lines, 0)


def stop_if_steps_fail(config: Config, iteration: int, metrics: dict[str, float], bad_steps: int) -> int:
    """Steps that were skipped in a row, `bad_steps` of them before this iteration; raises ValueError when they are more
    than train.max_bad_steps."""
    bad_steps = in_a_row(bad_steps, metrics)
    if bad_steps > config.train.max_bad_steps:
        raise ValueError(
            f"iteration {iteration}: {bad_steps} optimizer steps in a row were skipped, over "
            f"train.max_bad_steps={config.train.max_bad_steps}: their loss or gradient was not finite; look at the "
            f"samples, of which samples/it_{iteration:06d}.jsonl holds all, lower train.lr, or use "
            "model.dtype=float32"
        )
    return bad_steps


def stop_if_most_fail(config: Config, iteration: int, rows: list[dict[str, Any]]) -> None:
    """Raises ValueError when more than grade.max_failed_fraction of an iteration's samples failed in an engine or
    scorer: it is broken, not they."""
    errors = {
        "generation": [row["generate_error"] for row in rows if row["finish_reason"] == "failed"],
        "scoring": [row["score_error"] for row in rows if row.get("score_error")],
    }
    most = config.grade.max_failed_fraction
    for stage, found in errors.items():
        if len(found) > most * len(rows):
            raise ValueError(
                f"iteration {iteration}: {stage} failed for {len(found)} of {len(rows)} samples, over "
                f"grade.max_failed_fraction={most:g}. The commonest error: {Counter(found).most_common(1)[0][0]}"
            )


def stop_if_grading_fails(config: Config, iteration: int, rows: list[dict[str, Any]]) -> None:
    """Raises ValueError when more than grade.max_failed_fraction of an iteration's samples failed in grading, or of the
    samples of one grader, if they are enough to tell."""
    generated = [row for row in rows if row["finish_reason"] not in ("failed", "surplus")]
    grades = [grade for row in generated for grade in json.loads(row["grades"])]
    by_grader: dict[str, list[dict[str, Any]]] = {}
    for grade in grades:
        by_grader.setdefault(grade["grader"], []).append(grade)
    most = config.grade.max_failed_fraction
    for name, own in by_grader.items():
        failures = Counter(f"{grade['status']}: {grade['error']}" for grade in own if grade["status"] in FAILURES)
        if len(own) >= min(ENOUGH_TO_TELL, len(generated)) and failures.total() > most * len(own):
            raise ValueError(
                f"iteration {iteration}: the grader {name!r} failed for {failures.total()} of {len(own)} samples, over "
                f"grade.max_failed_fraction={most:g}; it seems to be broken. The commonest error: "
                f"{failures.most_common(1)[0][0]}"
            )
    failed = sum(row["grade_status"] in FAILURES for row in generated)
    if failed > most * len(generated):
        commonest = Counter(f"{g['grader']}: {g['status']}: {g['error']}" for g in grades if g["status"] in FAILURES)
        raise ValueError(
            f"iteration {iteration}: grading failed for {failed} of {len(generated)} samples, over "
            f"grade.max_failed_fraction={most:g}. The commonest error: {commonest.most_common(1)[0][0]}"
        )
