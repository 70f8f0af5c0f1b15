"""How long a finished sample waits for its grade, and what it costs to switch iterations.

Needs: nothing but the installation. Scripted engines finish about 30 samples a second with 64 in flight and about 50 a
second with 512; an instant grader grades them through the real plan. Times are of warm plans (the second on).

    python examples/bench/lag.py [--quick]
"""

import argparse
import json
import os
import statistics
import time

import numpy as np
import ray

from raypipe.config import Config, DataConfig, GradeConfig, GraderConfig, ModelConfig, PipelineConfig, RolloutConfig, RunConfig
from raypipe.scripted import scripted_run


class InstantGrader:
    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0] * len(solution_strs)


def measure(in_flight: int, per_second: float, iterations: int) -> dict[str, float]:
    """Figures of a run's warm iterations: `in_flight` samples each, `per_second` of which finish every second."""
    longest = in_flight / per_second
    config = Config(
        run=RunConfig(name=f"lag-{in_flight}", iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["scripted"], train_batch_size=in_flight // 8),
        rollout=RolloutConfig(n=8, max_response_length=64),
        grade=GradeConfig(graders=[GraderConfig(path=f"{__file__}:InstantGrader")], processes=1),
        pipeline=PipelineConfig(plans_ahead=int(os.environ.get("AHEAD", "1"))),
    )
    start_lags, end_lags, switches = [], [], []
    with scripted_run(config, prompts=in_flight, seconds=(0.5, 0.5 + longest), concurrency=in_flight) as run:
        feed, opened = run.feed(), 0.0
        for iteration in range(iterations):
            [rows] = run.rows([feed], iteration)
            if iteration:
                start_lags += [row["grade_start"] - row["generate_end"] for row in rows]
                end_lags += [row["received"] - row["generate_end"] for row in rows]
                switches.append(min(row["generate_start"] for row in rows) - opened)
            opened = time.time()
            run.open_gates(iteration + 1)
    return {
        "finished_to_graded_start_p50_s": float(np.percentile(start_lags, 50)),
        "finished_to_graded_start_p95_s": float(np.percentile(start_lags, 95)),
        "finished_to_learner_p95_s": float(np.percentile(end_lags, 95)),
        "switch_median_s": statistics.median(switches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 in flight only, three iterations")
    quick = parser.parse_args().quick
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    figures = {}
    for in_flight, per_second in [(64, 30.0)] if quick else [(64, 30.0), (512, 50.0)]:
        figures[f"in_flight_{in_flight}"] = found = measure(in_flight, per_second, 3 if quick else 6)
        print(f"{in_flight} in flight, about {per_second:g} samples finish a second:")
        for name, value in found.items():
            print(f"  {name:<34} {value * 1000:7.1f} ms")
    print(json.dumps({"bench": "lag", **figures}))


if __name__ == "__main__":
    main()
