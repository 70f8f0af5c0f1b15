"""vLLM through the plan against the same engine driven directly, with the same requests.

Needs: the installation, and for SmolLM2-135M a folder made by `python examples/make_smollm2.py`. Both ways run in turn,
several rounds, on one engine: directly all requests are handed to the engine's actor at once; through the plan they
pass Generate and an instant grader and arrive at a reader. The plan is warm, as in training, where it waits at the gate
for new weights; its time is from the open gate to the last row. What its start takes is printed beside it.

    python examples/bench/throughput.py [--quick] [--model FOLDER]
"""

import argparse
import concurrent.futures
import json
import statistics
import tempfile
import time
from pathlib import Path

import ray
import stand_ins
import torch
from transformers import LlamaForCausalLM

from raypipe.config import (
    Config,
    DataConfig,
    EngineConfig,
    GradeConfig,
    GraderConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from raypipe.engines.vllm import start_engines
from raypipe.feed import Feed
from raypipe.plans import sample_seed
from raypipe.prompts import Prompt
from raypipe.scripted import plan_run
from raypipe.weights import WeightPublisher

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "smollm2-135m"
PROMPT_TOKENS = 16
START_LIMIT_S = 60.0


def measure(name: str, model: Path, prompts: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of both ways, medians over `rounds`, and what a sample costs more through the plan."""
    config = Config(
        run=RunConfig(name=name, iterations=rounds + 1),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=["bench"], train_batch_size=prompts, max_prompt_length=PROMPT_TOKENS),
        rollout=RolloutConfig(n=8, max_response_length=tokens),
        engine=EngineConfig(num_cpus=2),
        grade=GradeConfig(graders=[GraderConfig(path=stand_ins.INSTANT)], processes=1),
    )
    data = [
        Prompt(f"p{i}", "bench", '""', "", [2 + (i + j) % 200 for j in range(PROMPT_TOKENS)], "1", "{}")
        for i in range(256)
    ]
    engines = start_engines(config, name)
    ray.get([engine.ready.remote() for engine in engines])
    weights, publisher = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32), WeightPublisher()
    direct, planned, starts = [], [], []
    reader = concurrent.futures.ThreadPoolExecutor(1)
    with plan_run(config, engines, data, []) as run:
        run.rows([Feed(run.server, rank=0, attempt=0, last=0)], 0)  # warms up the engine
        for i in range(1, rounds + 1):
            begin = time.perf_counter()
            reading = reader.submit(run.rows, [Feed(run.server, rank=0, attempt=0, last=i)], i)
            while ray.get(engines[0].stats.remote())["waiting"] < prompts * config.rollout.n:
                assert time.perf_counter() - begin < START_LIMIT_S, "the plan's requests do not arrive at the gate"
                time.sleep(0.05)
            starts.append(time.perf_counter() - begin)
            publisher.publish(weights, i, engines)  # the same weights under a new version: opens the gate
            [rows] = reading.result()
            took = max(row["received"] for row in rows) - min(row["generate_start"] for row in rows)
            planned.append((sum(len(row["response_ids"]) for row in rows), took))
            requests = [
                {
                    "sample_id": row["sample_id"], "plan": f"direct-{i}", "prompt_ids": row["prompt_ids"],
                    "min_version": 0, "seed": sample_seed(config.run.seed, row["sample_id"]),
                    "temperature": 1.0, "top_p": 1.0, "max_tokens": tokens, "stop": [],
                }
                for row in rows
            ]  # fmt: skip
            begin = time.perf_counter()
            done = ray.get([engines[0].generate.remote(request) for request in requests])
            direct.append((sum(len(row["response_ids"]) for row in done), time.perf_counter() - begin))
    ray.get([engine.close.remote() for engine in engines])
    for engine in engines:
        ray.kill(engine)
    samples = prompts * config.rollout.n
    cost = statistics.median(p[1] - d[1] for p, d in zip(planned, direct, strict=True)) / samples
    return {
        "samples": samples,
        "direct_tokens_per_s": statistics.median(count / took for count, took in direct),
        "plan_tokens_per_s": statistics.median(count / took for count, took in planned),
        "ratio": statistics.median((p[0] / p[1]) / (d[0] / d[1]) for p, d in zip(planned, direct, strict=True)),
        "plan_cost_ms_per_sample": cost * 1000,
        "plan_start_s": statistics.median(starts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, two rounds")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of the larger model")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        settings = [("tiny", stand_ins.make_tiny_model(Path(folder)), 16, 64, 2 if options.quick else 5)]
        if not options.quick and options.model.is_dir():
            settings.append((options.model.name, options.model, 8, 48, 4))
        elif not options.quick:
            print(f"{options.model} is not there: only the tiny model is measured")
        figures = {}
        for name, model, prompts, tokens, rounds in settings:
            figures[name] = found = measure(name, model, prompts, tokens, rounds)
            print(f"{name}: " + ", ".join(f"{key} {value:,.2f}" for key, value in found.items()))
    print(json.dumps({"bench": "throughput", **figures}))


if __name__ == "__main__":
    main()
