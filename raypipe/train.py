"""The command: `python -m raypipe.train --config configs/x.yaml key=value ...`.

In: a config. Out: a run folder with metrics, samples, timelines and checkpoints. This file is the run as prose: check
everything, start what is resident (engines, grade dispatcher, plan server), start the learner, then write down each
iteration as its record arrives. Heavy imports wait until the arguments are known to be good.
"""

import argparse
import dataclasses
import errno
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.config import Config
from raypipe.config_file import help_text, load_config
from raypipe.grading.results import FAILURES
from raypipe.stopping import RunStopped, Signals, Stalled

if TYPE_CHECKING:
    from raypipe.console import Console
    from raypipe.loggers import Tracker
    from raypipe.preflight import Inputs
    from raypipe.run_folder import RunFolder
    from raypipe.runtime import Runtime

# Samples of one grader below which its failures may be those of a few hard prompts.
ENOUGH_TO_TELL = 32


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.train",
        description="Train a language model by RL: generate, grade and train as one streaming plan per iteration.",
        epilog="keys, their defaults and meaning:\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the resource plan, and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        from raypipe.preflight import preflight

        inputs = preflight(config)
        if options.dry_run:
            print(inputs.report())
            return 0 if inputs.fits else 1
        run(config, inputs)
    except (ValueError, Stalled) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RunStopped as stop:
        print(stop, file=sys.stderr)
        return stop.code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error} (run.dir={config.run.dir}); make room and use run.resume=auto", file=sys.stderr)
        return 1
    return 0


def run(config: Config, inputs: "Inputs") -> Path:
    """Trains `config.run.iterations` iterations and returns the run's folder. `inputs` is what `preflight` found.

    Raises RunStopped after a signal, and Stalled, once the learner has saved its state where it could.
    """
    import ray

    from raypipe.checkpoint_files import find_start
    from raypipe.console import Console
    from raypipe.loggers import open_loggers
    from raypipe.memory import MemoryWatch
    from raypipe.plans import iteration_size
    from raypipe.run_folder import open_run
    from raypipe.runtime import LearnerRestarted, Runtime, start_ray
    from raypipe.targets import why_not_streaming

    folder = open_run(config, dataclasses.asdict(config))
    start = find_start(folder.checkpoints)
    first = start.iteration
    if first > config.run.iterations:
        raise ValueError(f"run.iterations={config.run.iterations}, but {start.path} has {first} behind it; raise it")
    folder.resume_at(first)
    console = Console(config.run.iterations, config.log.quiet)
    for note in start.notes:
        console.warn(note)
    for change in folder.changes if first else ():
        console.note(f"goes on with {change}")
        if change.startswith(("data.", "run.seed")):
            console.warn(
                f"{change.partition(':')[0]} decides which prompts come when: some may come again, or not at all"
            )
    if start.path:
        console.note(f"goes on from {start.path}, with {first} iterations behind it")
    tracker = open_loggers(config.log.loggers, folder, dataclasses.asdict(config), first)
    start_ray(config, sum(demand.count * demand.cpus for demand in inputs.demands))
    try:
        if reason := why_not_streaming(config):
            console.note(f"the learner waits for an iteration's last sample before it trains: {reason}")
        with Signals() as signals, Runtime(config, inputs, signals, console.warn) as runtime:
            iteration, end, bad_steps = first, 0.0, bad_steps_so_far(folder.read_metrics())
            try:
                runtime.start_learner(folder.path)
                memory = MemoryWatch()
                while iteration <= config.run.iterations:
                    samples = iteration_size(config, iteration, inputs.heldout_count)
                    try:
                        records = follow(runtime, console, iteration, samples)
                    except LearnerRestarted as news:
                        console.warn(f"the learner was lost and goes on from iteration {news.first}: {news}")
                        folder.resume_at(news.first)
                        iteration = news.first
                        continue
                    for note in records[0]["notes"]:
                        console.warn(note)
                    records[0]["metrics"] |= memory.read()
                    end, metrics = write_down(config, folder, console, tracker, iteration, records, end)
                    bad_steps = stop_if_steps_fail(config, iteration, metrics, bad_steps)
                    iteration += 1
            except (RunStopped, Stalled):
                saved, finished = runtime.stop(iteration)
                if finished:
                    write_down(config, folder, console, tracker, iteration, finished, end)
                console.note(where_it_stands(folder, saved))
                raise
            runtime.finish()
        stop_if_unsaved(records)
        console.summary([f"run folder: {folder.path}", f"look at it: python -m raypipe.report {folder.path}"])
    finally:
        tracker.close()
        console.close()
        ray.shutdown()
    return folder.path


def where_it_stands(folder: "RunFolder", saved: bool) -> str:
    """What a run that ended early says of its state."""
    from raypipe.checkpoint_files import find_start

    done = find_start(folder.checkpoints).iteration
    state = f"the state after {done} iterations is saved" if done else "nothing is saved: no iteration was finished"
    hurry = "" if saved else "; the learner did not end in watchdog.stop_s, so later work is lost"
    return f"{state}{hurry}; go on with run.resume=auto"


def follow(runtime: "Runtime", console: "Console", iteration: int, samples: int) -> list[dict[str, Any]]:
    """Shows the progress of an iteration until all ranks have reported it; returns their records."""
    console.start_iteration(iteration, samples)
    before = runtime.counts()

    def progress(counts: dict[str, int]) -> None:
        for stage, count in counts.items():
            console.progress(stage, min(samples, count - before.get(stage, 0)))

    return runtime.wait_for(iteration, progress)


def write_down(
    config: Config, folder: "RunFolder", console: "Console", tracker: "Tracker", iteration: int,
    records: list[dict[str, Any]], begin: float,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Writes an iteration's metrics, samples and timeline; returns when it ended, in seconds since the epoch, and the
    metrics.

    An iteration lasts from the end of the one before (`begin`) to the end of its weight update, so that their wall
    times add up to the run's.
    """
    from raypipe.metrics import iteration_metrics
    from raypipe.samples import pick, write_samples
    from raypipe.spans import collect
    from raypipe.timeline import summarize
    from raypipe.timeline_plot import draw
    from raypipe.timeline_trace import write_trace

    rows = [row for record in records for row in record["rows"]]
    spans = [span for record in records for span in record["spans"]]
    if not rows:
        return begin, {}
    found = collect(rows, spans)
    end = max(span.end for span in found)
    # Held-out samples may be done while the learner still writes a checkpoint, within the iteration before.
    summary = summarize(rows, spans, (begin if 0 < begin < end else found[0].start, end))
    metrics = iteration_metrics(iteration, rows, records[0]["metrics"], iteration, summary)
    folder.append_metrics(metrics)
    folder.append_stages(iteration, summary)
    # What a step that was skipped has seen is all kept, to be looked into.
    write_samples(folder.samples(iteration), rows, len(rows) if skipped_steps(metrics) else config.log.samples)
    tracker.log(iteration, metrics, pick(rows, config.log.samples))
    console.end_iteration(metrics)
    if iteration in config.log.timelines or iteration == config.run.iterations - 1:
        draw(folder.timeline(iteration, ".png"), found, summary, f"{config.run.name}, iteration {iteration}")
        write_trace(folder.timeline(iteration, ".json"), found)
        console.note(summary.advice)
    if metrics.get("mismatch/kl", 0.0) > config.engine.max_mismatch_kl:
        console.warn(
            f"iteration {iteration}: learner and engines disagree: mismatch/kl={metrics['mismatch/kl']:.3g} nats a "
            f"token is over engine.max_mismatch_kl={config.engine.max_mismatch_kl:g}; an engine may hold stale "
            "weights, or compute in another dtype than the learner"
        )
    stop_if_most_fail(config, iteration, rows)
    stop_if_grading_fails(config, iteration, rows)
    return max(begin, end), metrics


def stop_if_unsaved(records: list[dict[str, Any]]) -> None:
    """Raises ValueError if the last checkpoint of a run could not be written."""
    for record in records:
        if record["unsaved"]:
            raise ValueError(f"the run is done, but its last {record['unsaved']}; mend that and use run.resume=auto")


def bad_steps_so_far(lines: list[dict[str, float]]) -> int:
    """Steps that were skipped in a row at the end of a run's metrics."""
    bad_steps = 0
    for line in lines:
        skipped = skipped_steps(line)
        bad_steps = bad_steps + skipped if skipped else 0
    return bad_steps


def skipped_steps(metrics: dict[str, float]) -> int:
    return int(metrics.get("train/skipped_steps", 0) + metrics.get("critic/skipped_steps", 0))


def stop_if_steps_fail(config: Config, iteration: int, metrics: dict[str, float], bad_steps: int) -> int:
    """Steps that were skipped in a row, `bad_steps` of them before this iteration; raises ValueError when they are more
    than train.max_bad_steps."""
    skipped = skipped_steps(metrics)
    bad_steps = bad_steps + skipped if skipped else 0
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


if __name__ == "__main__":
    sys.exit(main())
