"""What overlap saves: an iteration through the streaming plan beside the same work phase after phase.

Needs: nothing but the installation. Engine, grader and learner are scripted (they sleep), so that they are resources of
their own; the plan, the gate, the feed and the grading queue are real. An iteration is 16 prompts of 8 samples, 32 of
them in the engine at a time; a response takes 0.5 to 2 s, and the learner 2.4 s in all, group after group as they
become complete. Grading all samples at once takes 0.2 or 1 times as long as generating them, or is so narrow that it
takes 3 times as long. The bound is what no schedule can go below with staleness 0: the busiest stage's own time,
measured in the phases, with what must come before it and after it.

    python examples/bench/overlap.py [--quick]
"""

import argparse
import json
import statistics
import time

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
from raypipe.plans import iteration_blocks
from raypipe.prompts import PromptOrder
from raypipe.rows import to_grade
from raypipe.scripted import ScriptedRun, scripted_prompts, scripted_run

PROMPTS, SAMPLES, IN_WORK = 16, 8, 32
SHORTEST_S, LONGEST_S, TRAIN_S = 0.5, 2.0, 2.4
# Seconds a grade takes, and how many run at once. Generation takes 128 * 1.25 / 32 = 5 s.
GRADERS = {"0.2x": (0.25, 32), "1x": (1.25, 32), "3x": (1.25, 11)}


def config_for(name: str, seconds: float, lanes: int, iterations: int) -> Config:
    grader = GraderConfig(path=stand_ins.WAITING, kwargs={"seconds": seconds}, max_batch=1)
    return Config(
        run=RunConfig(name=f"overlap-{name}", iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["scripted"], train_batch_size=PROMPTS),
        rollout=RolloutConfig(n=SAMPLES, max_response_length=64),
        grade=GradeConfig(graders=[grader], processes=1, async_concurrency=lanes),
        pipeline=PipelineConfig(plans_ahead=2),
    )


def streamed(run: ScriptedRun, iterations: int) -> list[float]:
    """Wall seconds of each warm iteration, from one gate's opening to the next."""
    feed, walls = run.feed(), []
    for iteration in range(iterations):
        begin, take, ended, groups = time.perf_counter(), feed.taker(iteration), False, {}
        while not ended:
            rows, ended = take(0.05)
            for row in rows:
                members = groups.setdefault(row["group_id"], [])
                members.append(row)
                if len(members) == SAMPLES:
                    time.sleep(TRAIN_S / PROMPTS)
        run.open_gates(iteration + 1)
        walls.append(time.perf_counter() - begin)
    return walls[1:]  # the first waits for its plan to start


def in_phases(run: ScriptedRun, iterations: int) -> list[tuple[float, float]]:
    """Wall seconds of generation and of grading, one after the other, straight at the engine and the grading queue."""
    prompts = scripted_prompts(PROMPTS * iterations)
    order, walls = PromptOrder(len(prompts), PROMPTS, 0, shuffle=True), []
    for iteration in range(iterations):
        blocks = iteration_blocks(run.config, iteration, order, None, prompts, [])
        rows = [row for block in blocks for row in block.to_pylist()]
        begin = time.perf_counter()
        shared = {"min_version": 0, "plan": f"phases-{iteration}", "max_tokens": 64}
        requests = [{key: row[key] for key in ("sample_id", "prompt_ids", "seed")} | shared for row in rows]
        responses = ray.get([run.engines[0].generate.remote(request) for request in requests])
        graded = [
            to_grade(row | response, f"phases-{iteration}") for row, response in zip(rows, responses, strict=True)
        ]
        generated = time.perf_counter()
        ray.get(run.dispatcher.grade.remote(graded))
        walls.append((generated - begin, time.perf_counter() - generated))
    return walls[1:]


def bound(generation: float, grading: float, seconds: float) -> float:
    """Seconds of an iteration that no schedule with staleness 0 can go below."""
    last_group = TRAIN_S / PROMPTS
    return max(generation + seconds, SHORTEST_S + grading, SHORTEST_S + seconds + TRAIN_S - last_group) + last_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the middle setting only, three iterations")
    quick = parser.parse_args().quick
    iterations = 3 if quick else 6
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    figures = {}
    for name, (seconds, lanes) in GRADERS.items():
        if quick and name != "1x":
            continue
        config = config_for(name, seconds, lanes, iterations)
        timing = (SHORTEST_S, LONGEST_S)
        with scripted_run(config, prompts=PROMPTS * iterations, seconds=timing, concurrency=IN_WORK) as run:
            wall = statistics.median(streamed(run, iterations))
            generation, grading = map(statistics.median, zip(*in_phases(run, iterations), strict=True))
        phases, least = generation + grading + TRAIN_S, bound(generation, grading, seconds)
        figures[name] = {"wall_s": wall, "bound_s": least, "over_bound": wall / least, "speed_up": phases / wall}
        print(
            f"grader {name:>4}: {wall:5.2f} s an iteration, {wall / least:.2f} of the bound of {least:.2f} s; "
            f"phase after phase {phases:5.2f} s, {phases / wall:.2f} times as long"
        )
    print(json.dumps({"bench": "overlap", **figures}))


if __name__ == "__main__":
    main()
