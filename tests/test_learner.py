"""The learner's result depends on the rows alone: not on ranks, micro-batches, or the order in which rows arrive."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_ranks import Job, train_on_ranks
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM

from raypipe import advantages, modeling
from raypipe.batching import pack_batch, pad_batch
from raypipe.config import AlgorithmConfig, Config, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from raypipe.modeling import learning_rate, load_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


def config_for(model: Path, algorithm: AlgorithmConfig = AlgorithmConfig(), **train: object) -> Config:  # noqa: B008
    return Config(
        run=RunConfig(iterations=3),
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=["x.jsonl"], train_batch_size=4, max_prompt_length=16),
        rollout=RolloutConfig(n=4, max_response_length=12, temperature=0.8),
        algorithm=algorithm,
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
                "sample_id": f"{seed}/{group}/{member}", "group_id": group, "group_size": members, "purpose": "train",
                "finish_reason": "stop",
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
def one_rank(model) -> dict[str, dict]:
    """Jobs on one rank; `reference` is what the others are compared with."""
    config, rows = config_for(model), rollouts(0)
    all_failed = [row | {"grade_status": "crash", "score": float("nan")} for row in rows]
    return train_on_ranks(
        1,
        {
            "reference": Job(config, [deal(rollouts(i), 1) for i in range(3)]),
            "small micro-batches": Job(
                config_for(model, micro_batch_tokens=28), [deal(rollouts(i), 1, seed=3) for i in range(3)]
            ),
            "one iteration": Job(config, [[rows]]),
            "two mini-batches": Job(config_for(model, mini_batches=2), [[rows]]),
            "two halves": Job(
                config,
                [[[row for row in rows if row["group_id"] < 2]], [[row for row in rows if row["group_id"] >= 2]]],
            ),
            "all failed": Job(config, [[all_failed]]),
            "no rows": Job(config, [[[]]]),
        },
    )


@pytest.fixture(scope="module")
def two_ranks(model) -> dict[str, dict]:
    config, rows = config_for(model), rollouts(0)
    failed = [row for row in rows if row["grade_status"] != "ok"]
    usable = [row for row in rows if row["grade_status"] == "ok"]
    assert len(usable) == 13
    return train_on_ranks(
        2,
        {
            "reference": Job(config, [deal(rollouts(i), 2, seed=7) for i in range(3)]),
            "one rank has only failures": Job(config, [[usable, failed]]),
            "one rank has nothing": Job(config, [[rows, []]]),
        },
    )


def test_two_ranks_give_the_parameters_of_one(one_rank, two_ranks):
    one, two = one_rank["reference"], two_ranks["reference"]
    assert largest_difference(one["parameters"], two["parameters"]) < 1e-5
    for name in ("policy/entropy", "policy/kl", "mismatch/mean", "mismatch/max", "grad_norm"):
        assert two["metrics"][2][name] == pytest.approx(one["metrics"][2][name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["one rank has only failures", "one rank has nothing"])
def test_a_rank_without_usable_rows_stays_in_step(one_rank, two_ranks, name):
    one, two = one_rank["one iteration"], two_ranks[name]
    assert largest_difference(one["parameters"], two["parameters"]) < 1e-5


def test_small_micro_batches_and_another_order_give_the_same_parameters(one_rank):
    small = one_rank["small micro-batches"]
    assert largest_difference(one_rank["reference"]["parameters"], small["parameters"]) < 1e-5


def test_sharded_training_equals_a_plain_torch_loop(model, one_rank):
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
    assert largest_difference(one_rank["reference"]["parameters"], plain) < 1e-5


def test_mini_batches_are_optimizer_steps_over_whole_prompts(one_rank):
    together, apart = one_rank["two mini-batches"], one_rank["two halves"]
    assert largest_difference(together["parameters"], apart["parameters"]) < 1e-5
    assert largest_difference(together["parameters"], one_rank["one iteration"]["parameters"]) > 1e-5


@pytest.mark.parametrize("name", ["all failed", "no rows"])
def test_nothing_usable_leaves_the_parameters_alone(model, one_rank, name):
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = {name: parameter.detach().numpy() for name, parameter in before.named_parameters()}
    assert largest_difference(one_rank[name]["parameters"], start) == 0
    assert "grad_norm" not in one_rank[name]["metrics"][0] or one_rank[name]["metrics"][0]["grad_norm"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_transformers_in_any_layout(model, temperature, monkeypatch):
    rows = [(row["prompt_ids"], row["response_ids"]) for row in rollouts(1)[:6]]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted, entropies = [], []
    with torch.no_grad():
        for prompt, response in rows:
            logprobs_TV = (
                plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
            ).log_softmax(-1)
            wanted.append(logprobs_TV.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
    policy = load_policy(ModelConfig(path=str(model)))
    for chunked in (False, True):
        if chunked:  # the head in chunks of three positions
            monkeypatch.setattr(modeling, "MAX_LOGITS", 3 * plain.config.vocab_size)
        for batch, packed in ((pad_batch(rows, 0), False), (pack_batch(rows), True)):
            with torch.no_grad():
                logprobs_N, entropy_N = policy(batch, packed, temperature)
            assert torch.allclose(logprobs_N, torch.cat(wanted), atol=1e-5)
            assert torch.allclose(entropy_N, torch.cat(entropies), atol=1e-4)


def test_learning_rate_schedules():
    assert [learning_rate(i, 10, 1.0, 2, "constant") for i in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert [learning_rate(i, 10, 1.0, 2, "linear") for i in (2, 6)] == [1.0, 0.5]
    assert learning_rate(6, 10, 1.0, 2, "cosine") == pytest.approx(0.5)
