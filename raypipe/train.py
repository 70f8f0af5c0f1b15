"""The command: `python -m raypipe.train --config configs/x.yaml key=value ...`.

In: a config. Out: a run folder with metrics, samples, timelines and checkpoints. This file is the run as prose: check
everything, start what is resident (engines, grade dispatcher, plan server), start the learner, then write down each
iteration as its record arrives. Heavy imports wait until the arguments are known to be good.
"""

import argparse
import dataclasses
import errno
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.config import Config
from raypipe.config_file import help_text, load_config
from raypipe.stopping import RunStopped, Signals, Stalled

if TYPE_CHECKING:
    from raypipe.checkpoint_files import Start
    from raypipe.console import Console
    from raypipe.logbook import Logbook
    from raypipe.preflight import Inputs
    from raypipe.run_folder import RunFolder
    from raypipe.runtime import Runtime


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
            print(inputs.report(config.data.train_batch_size))
            return 0 if inputs.fits else 1
        run(config, inputs)
    except (ValueError, Stalled) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RunStopped as stop:
        print(stop, file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
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
    from raypipe.run_folder import open_run

    folder = open_run(config, dataclasses.asdict(config))
    try:
        train(config, inputs, folder)
    except ValueError:  # a mistake that only the start could show
        folder.give_back()
        raise
    return folder.path


def train(config: Config, inputs: "Inputs", folder: "RunFolder") -> None:
    """The run in its folder."""
    from raypipe.checkpoint_files import find_start
    from raypipe.console import Console
    from raypipe.logbook import Logbook, bad_steps_so_far
    from raypipe.loggers import open_loggers
    from raypipe.residents import ray_session
    from raypipe.runtime import Runtime
    from raypipe.targets import why_not_streaming

    start = find_start(folder.checkpoints)
    first = start.iteration
    if first > config.run.iterations:
        raise ValueError(f"run.iterations={config.run.iterations}, but {start.path} has {first} behind it; raise it")
    folder.resume_at(first)
    console = Console(config.run.iterations, config.log.quiet)
    tell_start(console, folder, start)
    tracker = open_loggers(config.log.loggers, folder, dataclasses.asdict(config), first)
    if reason := why_not_streaming(config):
        console.note(f"the learner waits for an iteration's last sample before it trains: {reason}")
    cpus = sum(demand.count * demand.cpus for demand in inputs.demands)
    try:
        with (
            ray_session(config, cpus) as dashboard,
            Signals() as signals,
            Runtime(config, inputs, signals, console.warn) as runtime,
        ):
            if dashboard:
                console.note(f"Ray's dashboard: {dashboard} (it asks for the token in ~/.ray/auth_token)")
            runtime.start_learner(folder.path)
            bad_steps = bad_steps_so_far(folder.read_metrics())
            log = Logbook(config, folder, console, tracker, bad_steps=bad_steps)
            write_all(runtime, log, first, inputs.heldout_count)
            runtime.finish()
        console.summary([f"run folder: {folder.path}", f"look at it: python -m raypipe.report {folder.path}"])
    finally:
        tracker.close()
        console.close()


def tell_start(console: "Console", folder: "RunFolder", start: "Start") -> None:
    """Says what the run goes on from, and what is another than it was."""
    for note in start.notes:
        console.warn(note)
    if not start.path:
        return
    for change in folder.changes:
        console.note(f"goes on with {change}")
        if change.startswith(("data.", "run.seed")):
            key = change.partition(":")[0]
            console.warn(f"{key} decides which prompts come when: some may come again, or not at all")
    console.note(f"goes on from {start.path}, with {start.iteration} iterations behind it")


def write_all(runtime: "Runtime", log: "Logbook", iteration: int, heldout: int) -> None:
    """Follows and writes down every iteration from `iteration` on; from an earlier one again when the learner was lost
    and goes on from there."""
    from raypipe.memory import MemoryWatch
    from raypipe.plans import iteration_size
    from raypipe.runtime import LearnerRestarted

    memory, last = MemoryWatch(), log.config.run.iterations
    while iteration <= last:
        try:
            records = follow(runtime, log.console, iteration, iteration_size(log.config, iteration, heldout))
        except LearnerRestarted as news:
            log.console.warn(f"the learner was lost and goes on from iteration {news.first}: {news}")
            log.folder.resume_at(news.first)
            iteration = news.first
            continue
        except (RunStopped, Stalled):
            saved, finished = runtime.stop(iteration)
            if finished:
                log.write(iteration, finished)
            log.console.note(where_it_stands(log.folder, saved))
            raise
        for note in records[0]["notes"]:
            log.console.warn(note)
        records[0]["metrics"] |= memory.read()
        log.write(iteration, records)
        iteration += 1
    stop_if_unsaved(records)


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


def stop_if_unsaved(records: list[dict[str, Any]]) -> None:
    """Raises ValueError if the last checkpoint of a run could not be written."""
    for record in records:
        if record["unsaved"]:
            raise ValueError(f"the run is done, but its last {record['unsaved']}; mend that and use run.resume=auto")


if __name__ == "__main__":
    sys.exit(main())
