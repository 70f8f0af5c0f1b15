"""What waiting for the longest responses costs, and what each setting against it saves.

Needs: nothing but the installation; 2 cores and 8 GB are enough. Everything is as in `simulate.py` (real plans, gate,
feed, grading queue and learner's loop over two ranks; scripted engines, graders and forward passes), but that engines
have room for all samples at once, so that an iteration takes as long as its longest responses. 32 prompts x 16 samples,
each setting in turn for all its iterations; medians, without the first and the last (it carries nothing over).

    python examples/bench/tail.py [--quick] [--iterations 7] [--settings synchronous max_staleness ...]
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import simulate
import stand_ins

SAMPLES = 512
EIGHTH = 0.125
SHOWN = {"iteration_s": "time/iteration_s", "response_length": "response/length_mean", "efficiency": "efficiency"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "synchronous": {},
    "overprovision": {"rollout": {"overprovision": EIGHTH}},
    "carry_over": {
        "rollout": {"carry_over": EIGHTH},
        "pipeline": {"max_staleness": 1, "inflight_update": True},
    },
    "carry_over, streamed": {  # ratios to the engine's log-probs, so that the learner need not recompute them first
        "rollout": {"carry_over": EIGHTH},
        "pipeline": {"max_staleness": 1, "inflight_update": True},
        "algorithm": {"old_logprobs": "engine"},
    },
    "max_staleness": {"pipeline": {"max_staleness": 1}},
}


def config_of(setting: str, iterations: int, out: Path, model: Path) -> Any:
    config = simulate.config_for(SAMPLES, iterations, out, model)
    changed = {
        section: dataclasses.replace(getattr(config, section), **values)
        for section, values in SETTINGS[setting].items()
    }
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=setting), **changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 iterations")
    parser.add_argument("--iterations", type=int, default=7, help="of each setting")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    iterations = 4 if options.quick else options.iterations
    figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = stand_ins.make_tiny_model(Path(scratch, "model"))
        for setting in options.settings:
            config = config_of(setting, iterations, Path(scratch, "runs"), model)
            with simulate.cluster():
                # A rate at which all samples of two iterations and of what is over-provisioned have a slot.
                outcome = simulate.simulate(config, 3 * SAMPLES / simulate.TOKENS.mean / simulate.SECONDS_PER_TOKEN)
            kept = outcome.metrics[1:-1]
            figures[setting] = {
                name: statistics.median(line[metric] for line in kept) for name, metric in SHOWN.items()
            }
            print(setting, {key: round(value, 3) for key, value in figures[setting].items()}, flush=True)
    print(json.dumps({"bench": "tail", "iterations": iterations, **figures}))


if __name__ == "__main__":
    main()
