"""The learner beside a bare PyTorch loop: tokens trained per second and peak memory, at the demo's size and at 135 M.

Needs: `python examples/make_smollm2.py` for the larger model (left out with --quick), 8 GiB of memory. Both sides take
the same random samples (prompts of 8 to 32 tokens, responses of 8 to 128) in one mini-batch, the same token budget and
threads, and make one AdamW step on the clipped loss. The bare loop is what one would write by hand: transformers'
model, samples sorted by length and padded, all logits in float32, no FSDP. Each side runs in a process of its own, in
turns; tokens are prompts and responses, padding left out.

    python examples/bench/learner.py [--quick]
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "smollm2-135m"
LEARNING_RATE = 1e-5


def samples(seed: int, groups: int, members: int, vocab: int) -> list[dict]:
    draw = random.Random(seed)
    return [
        {
            "sample_id": f"{group}/{member}", "group_id": group, "group_size": members, "purpose": "train",
            "finish_reason": "stop", "prompt_ids": [draw.randrange(vocab) for _ in range(8 + group % 25)],
            "response_ids": [draw.randrange(vocab) for _ in range(draw.randint(8, 128))],
            "score": draw.random(), "grade_status": "ok",
        }
        for group in range(groups)
        for member in range(members)
    ]  # fmt: skip


def tiny_model(folder: Path) -> Path:
    """A Llama of the demo's size, 0.5 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_learner(model: Path, batches: list[list[dict]], budget: int, threads: int) -> list[float]:
    """Seconds of each iteration of raypipe's learner."""
    import torch
    import torch.distributed as dist

    from raypipe.config import Config, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
    from raypipe.learner import Learner
    from raypipe.streaming import Spans

    groups = 1 + max(row["group_id"] for row in batches[0])
    config = Config(
        run=RunConfig(iterations=len(batches)),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_batch_size=groups),
        rollout=RolloutConfig(n=batches[0][0]["group_size"]),
        train=TrainConfig(lr=LEARNING_RATE, micro_batch_tokens=budget, threads=threads),
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        learner, times = Learner(config, torch.device("cpu")), []
        for iteration, rows in enumerate(batches):
            begin = time.perf_counter()
            learner.iterate(iteration, lambda _, rows=rows: (rows, True), Spans())
            times.append(time.perf_counter() - begin)
        dist.destroy_process_group()
    return times


def run_bare(model: Path, batches: list[list[dict]], budget: int, threads: int) -> list[float]:
    """Seconds of each step of a loop written by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    times = []
    for rows in batches:
        begin = time.perf_counter()
        scores = torch.tensor([row["score"] for row in rows]).view(-1, rows[0]["group_size"])
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten().tolist()
        total = sum(len(row["response_ids"]) for row in rows)
        work = sorted(zip(rows, advantages, strict=True), key=lambda pair: -length(pair[0]))
        while work:
            size = max(1, budget // length(work[0][0]))
            micro, work = work[:size], work[size:]
            longest = length(micro[0][0])
            ids, mask, response = (torch.zeros(len(micro), longest, dtype=torch.long) for _ in range(3))
            for i, (row, _) in enumerate(micro):
                ids[i, : length(row)] = torch.tensor(row["prompt_ids"] + row["response_ids"])
                mask[i, : length(row)] = 1
                response[i, len(row["prompt_ids"]) : length(row)] = 1
            logits = policy(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
            old = torch.full_like(logprobs, -6.0)
            ratio = (logprobs - old).clamp(-20, 20).exp()
            advantage = torch.tensor([advantage for _, advantage in micro])[:, None]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            ((loss * response[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - begin)
    return times


def length(row: dict) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


SIDES = {"learner": run_learner, "bare": run_bare}


def side(name: str, model: str, groups: int, members: int, iterations: int, budget: int, threads: int) -> None:
    """One side in this process; prints seconds of each iteration and the peak memory in MiB."""
    vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    batches = [samples(seed, groups, members, vocab) for seed in range(iterations)]
    for row in (row for rows in batches for row in rows):
        row["engine_logprobs"] = [-6.0] * len(row["response_ids"])
        row["weight_versions"] = [0] * len(row["response_ids"])
    times = SIDES[name](Path(model), batches, budget, threads)
    print(json.dumps({"times": times, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def compare(label: str, model: Path, groups: int, iterations: int, rounds: int, budget: int, threads: int) -> dict:
    """Medians over `rounds` processes of each side, in turns; the first iteration of each is warm-up."""
    members = 4
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = [sum(length(row) for row in samples(seed, groups, members, vocab)) for seed in range(iterations)]
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    peaks: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name in SIDES:
            job = [name, str(model), groups, members, iterations, budget, threads]
            found = subprocess.run(
                [sys.executable, __file__, "--side", json.dumps(job)], capture_output=True, text=True, check=True
            )
            figures = json.loads(found.stdout.splitlines()[-1])
            rates[name] += [n / t for n, t in zip(tokens[1:], figures["times"][1:], strict=True)]
            peaks[name].append(figures["peak_mib"])
    rate = {name: statistics.median(found) for name, found in rates.items()}
    peak = {name: statistics.median(found) for name, found in peaks.items()}
    print(
        f"{label}: learner {rate['learner']:,.0f} tokens/s, bare loop {rate['bare']:,.0f}: "
        f"{rate['learner'] / rate['bare']:.2f}x; peak memory {peak['learner']:,.0f} MiB, bare {peak['bare']:,.0f}: "
        f"{peak['learner'] / peak['bare']:.2f}x"
    )
    return {
        "learner_tokens_per_s": rate["learner"], "bare_tokens_per_s": rate["bare"],
        "speed_ratio": rate["learner"] / rate["bare"], "memory_ratio": peak["learner"] / peak["bare"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only, one round")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(*json.loads(options.side))
        return
    rounds = 1 if options.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        figures = {"tiny": compare("0.5 M parameters", tiny_model(Path(folder)), 32, 8, rounds, 4096, options.threads)}
    if not options.quick:
        if not SMOLLM2.is_dir():
            sys.exit(f"{SMOLLM2} is missing: run python examples/make_smollm2.py, or pass --quick")
        figures["smollm2_135m"] = compare("SmolLM2-135M", SMOLLM2, 8, 4, 2, 2048, options.threads)
    print(json.dumps({"bench": "learner", **figures}))


if __name__ == "__main__":
    main()
