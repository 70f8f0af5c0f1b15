"""The command: `python -m raypipe.train --config configs/x.yaml key=value ...`.

In: a config. Out: a run folder with metrics, samples, timelines and checkpoints. This file is the run as prose: check
everything, start what is resident (engines, grade dispatcher, plan server), start the learner, then write down each
iteration as its record arrives. Heavy imports wait until the arguments are known to be good.
"""

import argparse
import sys
import threading
import time
from typing import Any

from raypipe.config import Config, help_text, load_config


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
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: Config, inputs: Any) -> None:
    """Trains `config.run.iterations` iterations. `inputs` is what `preflight` found (prompts)."""


if __name__ == "__main__":
    sys.exit(main())
