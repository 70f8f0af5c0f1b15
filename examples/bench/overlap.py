"""What overlap saves: an iteration through the streaming plan beside the same work phase after phase.

Needs: nothing but the installation. Engine, grader and learner are scripted (they sleep), so that they are resources of
their own; the plan, the gate, the feed and the grading queue are real. An iteration is 16 prompts of 8 samples, 32 of
them in the engine at a time; a response takes 0.5 to 2 s, and the learner 2.4 s in all, group after group as they
become complete. Grading all samples at once takes 0.2 or 1 times as long as generating them, or is so narrow that it
takes 3 times as long.

Staleness 0: the bound is what no schedule can go below, the busiest stage's own time, measured in the phases, with what
must come before it and after it. Staleness 1: the bound is the busiest stage's own time alone, what its work would take
if all its places (32 requests, the calls at a time) were always in use; idle is the part of their time that was not.

Real vLLM beside this, on cores that engine and learner share: `overlap_vllm.py`.

    python examples/bench/overlap.py [--quick] [--graders 0.2x 1x 3x] [--staleness 0 1]
"""

import argparse
import itertools
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


def config_for(name: str, seconds: float, lanes: int, iterations: int, staleness: int = 0) -> Config:
    grader = GraderConfig(path=stand_ins.WAITING, kwargs={"seconds": seconds}, max_batch=1)
    return Config(
        run=RunConfig(name=f"overlap-{name}", iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["scripted"], train_batch_size=PROMPTS),
        rollout=RolloutConfig(n=SAMPLES, max_response_length=64),
        grade=GradeConfig(graders=[grader], processes=1, async_concurrency=lanes),
        pipeline=PipelineConfig(plans_ahead=2, max_staleness=staleness),
    )


def streamed(run: ScriptedRun, iterations: int) -> tuple[list[float], list[dict]]:
    """When each iteration ended, in seconds since the epoch, and all rows."""
    feed, ends, rows = run.feed(), [], []
    for iteration in range(iterations):
        take, ended, groups = feed.taker(iteration), False, {}
        while not ended:
            found, ended = take(0.05)
            rows += found
            for row in found:
                members = groups.setdefault(row["group_id"], [])
                members.append(row)
                if len(members) == SAMPLES:
                    time.sleep(TRAIN_S / PROMPTS)
        run.open_gates(iteration + 1)
        ends.append(time.time())
    return ends, rows


def walls(ends: list[float]) -> list[float]:
    """Seconds of each warm iteration, from one gate's opening to the next; the first waits for its plan to start."""
    return [end - begin for begin, end in itertools.pairwise(ends)]


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


def in_use(rows: list[dict], begin: float, end: float, iterations: int, lanes: int) -> dict[str, float]:
    """Of each stage, the part of its places' time from `begin` to `end`, in which `iterations` ended, that was used."""

    def places(stage: str, width: int) -> float:
        spans = [(max(begin, row[f"{stage}_start"]), min(end, row[f"{stage}_end"])) for row in rows]
        return sum(max(0.0, until - since) for since, until in spans) / (width * (end - begin))

    return {
        "engine": places("generate", IN_WORK),
        "grader": places("grade", lanes),
        "learner": TRAIN_S * iterations / (end - begin),
    }


def on_policy(name: str, iterations: int) -> dict[str, float]:
    seconds, lanes = GRADERS[name]
    config = config_for(name, seconds, lanes, iterations)
    with scripted_run(
        config, prompts=PROMPTS * iterations, seconds=(SHORTEST_S, LONGEST_S), concurrency=IN_WORK
    ) as run:
        wall = statistics.median(walls(streamed(run, iterations)[0]))
        generation, grading = map(statistics.median, zip(*in_phases(run, iterations), strict=True))
    phases, least = generation + grading + TRAIN_S, bound(generation, grading, seconds)
    print(
        f"staleness 0, grader {name:>4}: {wall:5.2f} s an iteration, {wall / least:.2f} of the bound of {least:.2f} s; "
        f"phase after phase {phases:5.2f} s, {phases / wall:.2f} times as long"
    )
    return {"wall_s": wall, "bound_s": least, "over_bound": wall / least, "speed_up": phases / wall}


def one_behind(name: str, iterations: int) -> dict[str, float | str]:
    """Staleness 1; the first two and the last two iterations, where a neighbour is missing, are not measured."""
    seconds, lanes = GRADERS[name]
    total = iterations + 4
    config = config_for(f"{name}-stale", seconds, lanes, total, staleness=1)
    with scripted_run(config, prompts=PROMPTS * total, seconds=(SHORTEST_S, LONGEST_S), concurrency=IN_WORK) as run:
        ends, rows = streamed(run, total)
    begin, end = ends[1], ends[-3]
    used = in_use(rows, begin, end, iterations, lanes)
    stage = max(used, key=lambda each: used[each])
    wall = (end - begin) / iterations
    print(
        f"staleness 1, grader {name:>4}: {wall:5.2f} s an iteration, busiest is the {stage}, bound "
        f"{wall * used[stage]:.2f} s; its places were idle for {1 - used[stage]:.1%}"
    )
    return {"wall_s": wall, "bound_s": wall * used[stage], "busiest": stage, "idle": 1 - used[stage]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the middle grader only, three iterations")
    parser.add_argument("--graders", nargs="+", choices=GRADERS, default=list(GRADERS))
    parser.add_argument("--staleness", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    options = parser.parse_args()
    names, iterations = (["1x"], 3) if options.quick else (options.graders, 6)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rows = {0: on_policy, 1: one_behind}
    figures = {f"staleness {k}": {name: rows[k](name, iterations) for name in names} for k in options.staleness}
    print(json.dumps({"bench": "overlap", **figures}))


if __name__ == "__main__":
    main()
