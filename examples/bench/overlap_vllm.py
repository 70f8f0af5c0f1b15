"""What overlap saves with a real engine and learner: the streaming plan beside the same work phase after phase.

Needs: `python examples/make_demo.py` (its prompts) and `python examples/make_smollm2.py`. vLLM and raypipe's learner
hold SmolLM2-135M in float32; an iteration is 8 prompts x 8 samples of at most 48 tokens, 16 in the engine at a time; a
grade waits 2 s, as for a sandbox, and 10 run at a time, so that grading takes about as long as generation. Both ways
run on the same engine, grading queue and learner: first through the plan, then phase after phase (all requests to the
engine, then all grades, then one pass of the learner over all rows). Weights are published after each iteration.

Engine and learner share this machine's cores, so neither can hide the other. The bound is what no schedule can go
below, from the times measured in the phases: generation and training one after the other, or grading, whichever takes
longer, with what must come before and after it, and the weights.

    python examples/bench/overlap_vllm.py [--quick] [--iterations 4] [--model FOLDER]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from raypipe.carry import planned
from raypipe.config import (
    Config,
    DataConfig,
    EngineConfig,
    GradeConfig,
    GraderConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from raypipe.engines.vllm import start_engines
from raypipe.learner import Learner, publisher
from raypipe.plans import iteration_blocks
from raypipe.prompts import Prompt, PromptOrder, load_prompts
from raypipe.rows import to_grade
from raypipe.scripted import ScriptedRun, plan_run
from raypipe.streaming import Spans

CACHE = Path(__file__).parents[2] / ".cache"
PROMPTS, SAMPLES, TOKENS, IN_WORK = 8, 8, 48, 16
GRADE_S, GRADES_AT_A_TIME = 2.0, 10


class WaitingGrader:
    """Waits, and then prefers responses of many different characters."""

    async def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        import asyncio

        await asyncio.sleep(GRADE_S)
        return [len(set(text)) / 64 for text in solution_strs]


def config_for(model: Path, iterations: int, threads: int) -> Config:
    grader = GraderConfig(path=f"{__file__}:WaitingGrader", max_batch=1)
    return Config(
        run=RunConfig(name="overlap-vllm", iterations=iterations),
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(train_files=["demo"], train_batch_size=PROMPTS, max_prompt_length=128),
        rollout=RolloutConfig(n=SAMPLES, max_response_length=TOKENS),
        engine=EngineConfig(num_cpus=threads, max_num_seqs=IN_WORK),
        grade=GradeConfig(graders=[grader], processes=1, async_concurrency=GRADES_AT_A_TIME),
        # A micro-batch is about two prompts' samples, so that training can begin early.
        train=TrainConfig(threads=threads, micro_batch_tokens=1536),
        pipeline=PipelineConfig(plans_ahead=2),
    )


def phases(run: ScriptedRun, prompts: list[Prompt], learner: Learner, iteration: int, version: int) -> list[float]:
    """Seconds of generation, grading and training, one after the other."""
    order = PromptOrder(len(prompts), PROMPTS, 0, shuffle=True)
    blocks = iteration_blocks(run.config, iteration, planned(run.config, iteration), order, None, prompts, [])
    rows = [row for block in blocks for row in block.to_pylist()]
    times, plan = [time.perf_counter()], f"phases-{iteration}"
    shared = {"min_version": 0, "plan": plan, "max_tokens": TOKENS}
    requests = [{key: row[key] for key in ("sample_id", "prompt_ids", "seed")} | shared for row in rows]
    responses = ray.get([run.engines[0].generate.remote(request) for request in requests])
    rows = [row | response for row, response in zip(rows, responses, strict=True)]
    times.append(time.perf_counter())
    grades = ray.get(run.dispatcher.grade.remote([to_grade(row, plan) for row in rows]))
    rows = [row | grade for row, grade in zip(rows, grades, strict=True)]
    times.append(time.perf_counter())
    learner.iterate(version, lambda _: (rows, True), Spans())
    times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def bound(generation: float, grading: float, training: float, weights: float) -> float:
    """Seconds of an iteration that no schedule with staleness 0 can go below on shared cores."""
    first, last = generation / (PROMPTS * SAMPLES / IN_WORK), training / PROMPTS
    return max(generation + training, generation + GRADE_S + last, first + grading + last) + weights


def measure(model: Path, iterations: int, threads: int) -> dict[str, float]:
    """Medians over `iterations` of both ways, after one that warms up."""
    config = config_for(model, 2 * iterations + 2, threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = load_prompts(["train.jsonl"], config.data, tokenizer, CACHE / "demo").prompts
    engines = start_engines(config, config.run.name)
    with tempfile.TemporaryDirectory() as folder, plan_run(config, engines, prompts, []) as run:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        learner = Learner(config, torch.device("cpu"))
        publish, feed = publisher(learner, engines, {}, in_flight=False), run.feed()
        streamed, phased, weights = [], [], []
        begin = time.perf_counter()
        for iteration in range(iterations + 1):
            learner.iterate(iteration, feed.taker(iteration), Spans())
            publishing = time.perf_counter()
            publish(iteration + 1)
            end = time.perf_counter()
            streamed.append(end - begin)
            weights.append(end - publishing)
            begin = end
        # The plans that wait at the gate for the weights after these go on waiting.
        for iteration in range(iterations + 1):
            phased.append(phases(run, prompts, learner, iteration, iterations + 1))
        dist.destroy_process_group()
    ray.get([engine.close.remote() for engine in engines])
    generation, grading, training = (statistics.median(times) for times in zip(*phased[1:], strict=True))
    moved, wall = statistics.median(weights[1:]), statistics.median(streamed[1:])
    least, one_by_one = bound(generation, grading, training, moved), generation + grading + training + moved
    print(
        f"generation {generation:.2f} s, grading {grading:.2f}, training {training:.2f}, weights {moved:.2f}\n"
        f"through the plan {wall:.2f} s an iteration, {wall / least:.2f} of the bound of {least:.2f} s; phase after "
        f"phase {one_by_one:.2f} s, {one_by_one / wall:.2f} times as long"
    )
    return {
        "wall_s": wall, "bound_s": least, "over_bound": wall / least, "speed_up": one_by_one / wall,
        "generation_s": generation, "grading_s": grading, "training_s": training, "weights_s": moved,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one iteration of each way")
    parser.add_argument("--iterations", type=int, default=4, help="of each way, after one that warms up")
    parser.add_argument("--model", type=Path, default=CACHE / "smollm2-135m")
    options = parser.parse_args()
    for path, maker in ((CACHE / "demo" / "train.jsonl", "make_demo.py"), (options.model, "make_smollm2.py")):
        if not path.exists():
            sys.exit(f"{path} is missing: run python examples/{maker}")
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    figures = measure(options.model, 1 if options.quick else options.iterations, len(os.sched_getaffinity(0)))
    print(json.dumps({"bench": "overlap_vllm", **figures}))


if __name__ == "__main__":
    main()
