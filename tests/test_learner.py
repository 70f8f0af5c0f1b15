"""The learner's result depends on the rows alone: not on ranks, micro-batches, or the order in which rows arrive."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_ranks import train_on_ranks
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM

from raypipe import advantages
from raypipe.config import AlgorithmConfig, Config, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


def config_for(model: Path, **train: object) -> Config:
    return Config(
        run=RunConfig(iterations=3),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=["x.jsonl"], train_batch_size=4, max_prompt_length=16),
        rollout=RolloutConfig(n=4, max_response_length=12, temperature=0.8),
        algorithm=AlgorithmConfig(),
        train=TrainConfig(**{"lr": 1e-3, "micro_batch_tokens": 64, **train}),
    )


def rollouts(seed: int, groups: int = 4, members: int = 4) -> list[dict]:
    """Samples as they come out of Grade: random tokens, scores, and one failed grade in three groups."""
    draw = random.Random(seed)
    rows = []
    for group in range(groups):
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 10))]
        for member in range(members):
            response = [draw.randrange(256) for _ in range(draw.randint(1, 12))]
            failed = member == 0 and group < 3
            rows.append({
                "sample_id": f"{seed}/{group}/{member}", "group_id": group, "purpose": "train",
                "prompt_ids": prompt, "response_ids": response,
                "engine_logprobs": [draw.uniform(-7, -4) for _ in response],
                "score": float("nan") if failed else draw.random(), "grade_status": "timeout" if failed else "ok",
            })  # fmt: skip
    return rows


def deal(rows: list[dict], ranks: int, seed: int = 0) -> list[list[dict]]:
    """Rows in a random order, unevenly over ranks."""
    rows = [dict(row) for row in rows]
    random.Random(seed).shuffle(rows)
    return [rows[rank::ranks] for rank in range(ranks)]


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


@pytest.fixture(scope="module")
def reference(model) -> dict:
    return train_on_ranks(config_for(model), [deal(rollouts(i), 1) for i in range(3)])


def test_two_ranks_give_the_parameters_of_one(model, reference):
    two = train_on_ranks(config_for(model), [deal(rollouts(i), 2, seed=7) for i in range(3)])
    assert largest_difference(reference["parameters"], two["parameters"]) < 1e-5
    assert two["records"][0]["policy/entropy"] == pytest.approx(reference["records"][0]["policy/entropy"], rel=1e-5)
    assert two["records"][2]["grad_norm"] == pytest.approx(reference["records"][2]["grad_norm"], rel=1e-4)


def test_a_rank_without_usable_rows_stays_in_step(model):
    rows = rollouts(0)
    one = train_on_ranks(config_for(model), [[rows]])
    failed = [row for row in rows if row["grade_status"] != "ok"]
    two = train_on_ranks(config_for(model), [[[row for row in rows if row not in failed], failed]])
    assert largest_difference(one["parameters"], two["parameters"]) < 1e-5


def test_small_micro_batches_give_the_parameters_of_large_ones(model, reference):
    small = train_on_ranks(config_for(model, micro_batch_tokens=28), [deal(rollouts(i), 1) for i in range(3)])
    assert largest_difference(reference["parameters"], small["parameters"]) < 1e-5


def test_sharded_training_equals_a_plain_torch_loop(model, reference):
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for iteration in range(3):
        rows = [row for row in rollouts(iteration) if row["grade_status"] == "ok"]
        advantages_B = advantages.grpo(
            torch.tensor([row["score"] for row in rows]), torch.tensor([row["group_id"] for row in rows]),
            torch.ones(len(rows), dtype=torch.bool),
        )  # fmt: skip
        tokens = sum(len(row["response_ids"]) for row in rows)
        for row, advantage in zip(rows, advantages_B, strict=True):
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            start = len(row["prompt_ids"])
            logprobs_TV = (policy(ids).logits[0, start - 1 : -1] / 0.8).log_softmax(-1)
            ratio_T = (logprobs_TV.gather(1, ids[0, start:, None])[:, 0] - torch.tensor(row["engine_logprobs"])).exp()
            loss_T = torch.maximum(-advantage * ratio_T, -advantage * ratio_T.clamp(0.8, 1.2))
            (loss_T.sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain = {name: parameter.detach().numpy() for name, parameter in policy.named_parameters()}
    assert largest_difference(reference["parameters"], plain) < 1e-5


def test_mini_batches_are_optimizer_steps_over_whole_prompts(model):
    rows = rollouts(0)
    together = train_on_ranks(config_for(model, mini_batches=2), [[rows]])
    apart = train_on_ranks(
        dataclasses.replace(config_for(model), run=RunConfig(iterations=2)),
        [[[row for row in rows if row["group_id"] < 2]], [[row for row in rows if row["group_id"] >= 2]]],
    )
    assert largest_difference(together["parameters"], apart["parameters"]) < 1e-5


def test_nothing_usable_leaves_the_parameters_alone(model):
    rows = [row | {"grade_status": "crash", "score": float("nan")} for row in rollouts(0)]
    after = train_on_ranks(config_for(model), [[rows]])
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert largest_difference(after["parameters"], {n: p.detach().numpy() for n, p in before.named_parameters()}) == 0
