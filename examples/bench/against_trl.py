"""An iteration of raypipe beside one of TRL's GRPOTrainer: same model, prompts, reward functions and threads.

Needs: `pip install raypipe[bench]` (TRL), `python examples/make_demo.py`, for SmolLM2-135M `python
examples/make_smollm2.py` (left out with --quick), 8 GiB of memory, no GPU. Both sides make one AdamW step an iteration
on policy, without a reference, in float32 or (--dtype) in bfloat16 with weights in float32: the demo's 0.5 M-parameter
model with 16 prompts x 8 samples of 64 tokens, SmolLM2-135M with 4 x 8 of 48. The models are copies whose end token is
one that they do not write, so that all responses have full length. TRL generates with transformers (its vLLM modes need
a GPU), without gradient checkpointing.

Each side is one process a model and number of threads; the reward functions (`trl_rewards.py`) take turns iteration by
iteration, so that whatever else the machine does meets all alike. Times are medians of the iterations after a warm-up.
TRL's threads are OMP_NUM_THREADS, raypipe's are engine.num_cpus and train.threads. Where rest is below 0, parts ran at
the same time. The last line is one JSON object.

    python examples/bench/against_trl.py [--quick] [--models tiny ...] [--rewards instant ...] [--threads 1 2]
        [--dtype bfloat16]
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from trl_rewards import PROCESSES, REWARDS

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache"
DATA = CACHE / "demo" / "train.jsonl"
LEARNING_RATE = 1e-6
WARM_UP = 2
PARTS = ("generation", "grading", "step", "weights")
Iteration = dict[str, float]  # seconds of `wall` and PARTS, and `tokens`, the mean length of a response


@dataclass(frozen=True)
class Setting:
    """A model, made by `maker`, and how much it generates: `prompts` x `samples` of `tokens`.

    never: a token that it does not write, its end token here.
    micro_batch: tokens of one forward pass in raypipe: a few prompts' samples, so that training begins early.
    """

    model: str
    maker: str
    prompts: int
    samples: int
    tokens: int
    never: str
    micro_batch: int


SETTINGS = {
    "tiny": Setting("demo/model", "make_demo.py", 16, 8, 64, "<|pad|>", 4096),
    "smollm2-135m": Setting("smollm2-135m", "make_smollm2.py", 4, 8, 48, "<issue_closed>", 1536),
}


def endless(model: Path, never: str, folder: Path) -> Path:
    """A copy of `model` whose end token is `never`."""
    shutil.copytree(model, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in tokens if token["content"] == never)
    for name, key, value in (
        ("config.json", "eos_token_id", end),
        ("generation_config.json", "eos_token_id", end),
        ("tokenizer_config.json", "eos_token", never),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: value}))
    return folder


def prompts(count: int) -> list[list[dict[str, str]]]:
    with DATA.open() as lines:
        found = [json.loads(line)["prompt"] for _, line in zip(range(count), lines, strict=False)]
    return [found[i % len(found)] for i in range(count)]


# TRL


def run_trl(setting: Setting, model: str, turns: list[str], folder: str, dtype: str) -> list[Iteration]:
    """One iteration for each of `turns`, names of reward functions."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    size, iterations, spent = setting.prompts * setting.samples, [], Counter()

    class Clock(TrainerCallback):
        began, ended = 0.0, 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()
            trainer.reward_funcs = [REWARDS[turns[state.global_step]][0]]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            step = now - self.began - spent.pop("prepare")  # forward, backward, optimizer
            iterations.append({**spent, "step": step, "weights": 0.0, "wall": now - (self.ended or self.began)})
            print(iterations[-1], file=sys.stderr)
            self.ended = now
            spent.clear()

    def timed(name: str, part: str) -> None:
        """Adds what the trainer's method takes to `part`."""
        method = getattr(trainer, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args, **kwargs)
            spent[part] += time.perf_counter() - begin
            if part == "generation":
                spent["tokens"] = statistics.mean(map(len, result[0]))
            return result

        setattr(trainer, name, run)

    args = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=dtype == "bfloat16", max_steps=len(turns), learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", per_device_train_batch_size=size, gradient_accumulation_steps=1,
        num_generations=setting.samples, max_completion_length=setting.tokens, temperature=1.0, top_p=1.0, top_k=0,
        beta=0.0, gradient_checkpointing=False, shuffle_dataset=False, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        # With an async function first it also starts the event loop that such functions need.
        model=model, reward_funcs=REWARDS["waits"][0], args=args, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(setting.prompts * len(turns))]),
    )  # fmt: skip
    timed("_generate_single_turn", "generation")
    timed("_calculate_rewards", "grading")
    timed("_prepare_inputs", "prepare")
    trainer.train()
    return iterations


# raypipe


def run_raypipe(
    setting: Setting, model: str, turns: list[str], folder: str, threads: int, dtype: str
) -> list[Iteration]:
    """The same by `python -m raypipe.train`: the prompts of an iteration have its reward function as data source."""
    data = Path(folder) / "prompts.jsonl"
    own = [name for name in turns for _ in range(setting.prompts)]
    rows = [{"prompt": prompt, "data_source": name} for prompt, name in zip(prompts(len(own)), own, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    graders = [
        {"path": f"{HERE / 'trl_rewards.py'}:{REWARDS[name][1]}", "name": name, "data_sources": [name]}
        for name in dict.fromkeys(turns)
    ]
    config = {
        "run": {"name": "bench", "dir": folder, "iterations": len(turns)},
        "model": {"path": model, "dtype": dtype},
        "data": {
            "train_files": [str(data)], "train_batch_size": setting.prompts, "max_prompt_length": 128, "shuffle": False,
            "require_ground_truth": False,
        },
        "rollout": {"n": setting.samples, "max_response_length": setting.tokens},
        "engine": {"num_cpus": threads},
        "grade": {
            "graders": graders, "processes": PROCESSES, "async_concurrency": setting.prompts * setting.samples,
        },
        "train": {"lr": LEARNING_RATE, "threads": threads, "micro_batch_tokens": setting.micro_batch},
        "pipeline": {"plans_ahead": 2},
        "checkpoint": {"every": 0},
        "log": {"timelines": [], "loggers": [], "samples": 0, "dashboard": False, "quiet": True},
    }  # fmt: skip
    file = Path(folder) / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    # Ray would start its workers at a lower priority than other programs'.
    environment = os.environ | {"RAY_worker_niceness": "0"}
    command = [sys.executable, "-m", "raypipe.train", "--config", str(file)]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    lines = (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
    keys = {
        "wall": "iteration_s", "generation": "generate_s", "grading": "grade_s", "step": "train_s",
        "weights": "update_weights_s",
    }  # fmt: skip
    return [
        {name: line[f"time/{key}"] for name, key in keys.items()} | {"tokens": line["response/length_mean"]}
        for line in map(json.loads, lines)
    ]


# side by side


def run_side(side: str, name: str, model: Path, turns: list[str], threads: int, dtype: str) -> list[Iteration]:
    """The iterations of one side, in a process of its own, less those of the warm-up."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    job = [side, name, str(model), turns, threads, dtype]
    command = [sys.executable, __file__, "--side", json.dumps(job)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if found.returncode:
        sys.exit(f"{side} failed")
    return json.loads(found.stdout.splitlines()[-1])[WARM_UP:]


def medians(iterations: list[Iteration]) -> Iteration:
    found = {key: statistics.median(each.get(key, 0.0) for each in iterations) for key in ("wall", "tokens", *PARTS)}
    return found | {"rest": found["wall"] - sum(found[part] for part in PARTS)}


def show(side: str, found: Iteration) -> None:
    parts = "".join(f"{found[part]:12.2f}" for part in (*PARTS, "rest"))
    print(f"    {side:10}{found['wall']:8.2f}{parts}{found['tokens']:9.1f}")


def compare(name: str, rewards: list[str], threads: int, rounds: int, dtype: str) -> dict[str, Any]:
    """Both sides at one setting: medians by reward function."""
    setting, turns = SETTINGS[name], [*[rewards[0]] * WARM_UP, *rewards * rounds]
    with tempfile.TemporaryDirectory() as folder:
        model = endless(CACHE / setting.model, setting.never, Path(folder) / "model")
        sides = {side: run_side(side, name, model, turns, threads, dtype) for side in ("trl", "raypipe")}
    heading = "".join(f"{part:>12}" for part in (*PARTS, "rest"))
    print(
        f"\n{name}, {setting.prompts} x {setting.samples} samples of {setting.tokens} tokens, {dtype}, "
        f"{threads} threads, medians of {rounds}, seconds\n{'':14}{'wall':>8}{heading}   tokens"
    )
    figures = {}
    for at, reward in enumerate(rewards):
        trl, raypipe = (medians(sides[side][at :: len(rewards)]) for side in ("trl", "raypipe"))
        figures[reward] = {"trl": trl, "raypipe": raypipe, "ratio": trl["wall"] / raypipe["wall"]}
        print(f"  {reward}: TRL takes {figures[reward]['ratio']:.2f} times as long")
        show("TRL", trl)
        show("raypipe", raypipe)
    return figures


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model, two reward functions, one thread")
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, cores}), help="of torch; default 1, cores")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--rounds", type=int, default=3, help="measured iterations of each reward function")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, name, model, turns, threads, dtype = json.loads(options.side)
        with tempfile.TemporaryDirectory() as folder:
            if side == "trl":
                found = run_trl(SETTINGS[name], model, turns, folder, dtype)
            else:
                found = run_raypipe(SETTINGS[name], model, turns, folder, threads, dtype)
        print(json.dumps(found))
        return
    if options.quick:
        options.models, options.rewards, options.threads = ["tiny"], ["instant", "waits"], [1]
    needs = [(DATA, "make_demo.py"), *((CACHE / SETTINGS[name].model, SETTINGS[name].maker) for name in options.models)]
    for path, maker in needs:
        if not path.exists():
            sys.exit(f"{path} is missing: run python examples/{maker}")
    if not importlib.util.find_spec("trl"):
        sys.exit("trl is missing: pip install raypipe[bench]")
    figures = {
        f"{name}, {threads} threads": compare(name, options.rewards, threads, options.rounds, options.dtype)
        for name in options.models
        for threads in options.threads
    }
    print(json.dumps({"bench": "against_trl", "dtype": options.dtype, **figures}))


if __name__ == "__main__":
    main()
