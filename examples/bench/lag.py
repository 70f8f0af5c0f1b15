"""How long a finished sample waits for its grade, and what it costs to switch iterations.

Needs: nothing but the installation. Scripted engines finish about 30 samples a second with 64 in flight and about 50 a
second with 512; an instant grader grades them through the real plan. Times are of warm plans (the second on). 64
samples last 2.6 s, less than a plan takes to start beside them, so there two plans wait at the gate.

    python examples/bench/lag.py [--quick] [--samples-per-block N]
"""

import argparse
import itertools
import json
import statistics
import time

import numpy as np
import ray
import stand_ins

from raypipe.config import (
    Config,
    DataConfig,
    GradeConfig,
    GraderConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
)
from raypipe.scripted import scripted_run


def measure(
    in_flight: int, per_second: float, plans_ahead: int, iterations: int, samples_per_block: int = 0
) -> dict[str, float]:
    """Figures of a run's warm iterations: `in_flight` samples each, `per_second` of which finish every second."""
    longest = in_flight / per_second
    config = Config(
        run=RunConfig(name=f"lag-{in_flight}", iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["scripted"], train_batch_size=in_flight // 8),
        rollout=RolloutConfig(n=8, max_response_length=64, samples_per_block=samples_per_block),
        grade=GradeConfig(graders=[GraderConfig(path=stand_ins.INSTANT)], processes=1),
        pipeline=PipelineConfig(plans_ahead=plans_ahead),
    )
    start_lags, end_lags, switches, overlaps = [], [], [], []
    with scripted_run(config, prompts=in_flight, seconds=(0.5, 0.5 + longest), concurrency=in_flight) as run:
        feed, opened = run.feed(), 0.0
        for iteration in range(iterations):
            [rows] = run.rows([feed], iteration)
            ends = [row["generate_end"] for row in rows]
            overlaps.append(max(ends) - min(row["grade_start"] for row in rows))
            if iteration:
                start_lags += [row["grade_start"] - row["generate_end"] for row in rows]
                # A block is complete with its last sample.
                blocks = itertools.groupby(rows, key=lambda row: row["received"])
                end_lags += [received - max(row["generate_end"] for row in block) for received, block in blocks]
                switches.append(min(row["generate_start"] for row in rows) - opened)
            opened = time.time()
            run.open_gates(iteration + 1)
    return {
        "finished_to_graded_start_p50_s": float(np.percentile(start_lags, 50)),
        "finished_to_graded_start_p95_s": float(np.percentile(start_lags, 95)),
        "block_finished_to_learner_p95_s": float(np.percentile(end_lags, 95)),
        "switch_median_s": statistics.median(switches),
        "first_grade_before_last_generation_s": min(overlaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 in flight only, three iterations")
    parser.add_argument("--samples-per-block", type=int, default=0, help="rollout.samples_per_block; 0: the group of 8")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    figures = {}
    for in_flight, per_second, plans_ahead in [(64, 30.0, 2)] if options.quick else [(64, 30.0, 2), (512, 50.0, 1)]:
        iterations = 3 if options.quick else 6
        found = measure(in_flight, per_second, plans_ahead, iterations, options.samples_per_block)
        figures[f"in_flight_{in_flight}"] = found
        print(f"{in_flight} in flight, about {per_second:g} samples finish a second:")
        for name, value in found.items():
            print(f"  {name:<36} {value * 1000:7.1f} ms")
    print(json.dumps({"bench": "lag", **figures}))


if __name__ == "__main__":
    main()
