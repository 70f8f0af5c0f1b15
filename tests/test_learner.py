"""The learner's result depends on the rows alone: not on ranks, micro-batches, or the order in which rows arrive."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_ranks import Job, train_on_ranks
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM

from raypipe import advantages, modeling
from raypipe.batching import Layout, lay_out
from raypipe.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from raypipe.metrics import METRICS, legend
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
        train=TrainConfig(**{"lr": 3e-4, "micro_batch_tokens": 64, **train}),
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
                "sample_id": f"{seed}/{group}/{member}", "group_id": group, "group_size": members, "member": member,
                "purpose": "train",
                "finish_reason": "length" if len(response) == 12 else "stop",
                "prompt_ids": prompt, "response_ids": response,
                "engine_logprobs": [draw.uniform(-7, -4) for _ in response],
                "weight_versions": [seed] * len(response),
                "ref_logprobs": [draw.uniform(-7, -4) for _ in response],
                "values": [draw.uniform(-1, 1) for _ in response],
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


# Every option of the loss and of the targets, in combinations that go together.
RECIPES = {
    "ppo": AlgorithmConfig(adv_estimator="gae", lam=0.9, gamma=0.99, kl_coef=0.1, kl_in="reward", kl_target=0.05),
    "ppo, whitened by mini-batch": AlgorithmConfig(adv_estimator="gae", whiten="mini_batch", entropy_coef=0.01),
    "ppo, not whitened": AlgorithmConfig(adv_estimator="gae", lam=0.9, whiten="none"),
    "grpo with a KL": AlgorithmConfig(kl_coef=0.05, kl_estimator="k3", loss_agg="seq_mean_token_mean"),
    "dapo": AlgorithmConfig(clip_high=0.28, dual_clip=3.0, mask_truncated=True),
    "dr_grpo": AlgorithmConfig(adv_estimator="dr_grpo", loss_agg="dr_grpo", entropy_coef=0.01),
    "rloo": AlgorithmConfig(adv_estimator="rloo", kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
    "reinforce_pp": AlgorithmConfig(adv_estimator="reinforce_pp", gamma=0.99, kl_coef=0.1, kl_in="reward"),
    "gspo": AlgorithmConfig(policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_agg="seq_mean_token_mean"),
    "cispo": AlgorithmConfig(policy_loss="cispo", clip_low=1.0, clip_high=0.3),
    "corrected": AlgorithmConfig(old_logprobs="learner", tis="token", seq_ratio_low=0.3, token_ratio_low=1e-3),
}


def recipe_jobs(model: Path, ranks: int, chunk: int, **train: object) -> dict[str, Job]:
    """Three iterations of every recipe, two mini-batches each. AdamW turns rounding of a gradient near 0 into a part of
    the learning rate, so it is small."""
    return {
        name: Job(
            config_for(model, algorithm, **{"mini_batches": 2, "lr": 1e-4, **train}),
            [deal(rollouts(i), ranks, seed=ranks + chunk) for i in range(3)],
            chunk,
            pauses=True,
        )
        for name, algorithm in RECIPES.items()
    }


@pytest.fixture(scope="module")
def one_rank(model) -> dict[str, dict]:
    """Jobs on one rank; `reference` is what the others are compared with."""
    config, rows = config_for(model), rollouts(0)
    all_failed = [row | {"grade_status": "crash", "score": float("nan")} for row in rows]
    jobs = {
        "reference": Job(config, [deal(rollouts(i), 1) for i in range(3)]),
        "one at a time": Job(config, [deal(rollouts(i), 1, seed=5) for i in range(3)], chunk=1),
        "waits": Job(config_for(model, stream=False), [deal(rollouts(i), 1, seed=5) for i in range(3)], chunk=3),
        "padded": Job(config, [deal(rollouts(i), 1) for i in range(3)], layout=Layout(0, False)),
        "packed": Job(config, [deal(rollouts(i), 1) for i in range(3)], layout=Layout(256, False)),
        "one long row": Job(config, [deal(rollouts(i), 1) for i in range(3)], layout=Layout(1_000_000, True)),
        "small micro-batches": Job(
            config_for(model, micro_batch_tokens=28), [deal(rollouts(i), 1, seed=3) for i in range(3)]
        ),
        "one iteration": Job(config, [[rows]]),
        "a group at a time": Job(config_for(model, micro_batch_tokens=1_000_000), [[rows]], chunk=4, pauses=True),
        "two mini-batches": Job(config_for(model, mini_batches=2), [[rows]]),
        "two halves": Job(
            config,
            [[[row for row in rows if row["group_id"] < 2]], [[row for row in rows if row["group_id"] >= 2]]],
        ),
        "one iteration with surplus": Job(overprovision_config(model), [[with_surplus(rows)]], chunk=3),
        "all failed": Job(config, [[all_failed]]),
        "no rows": Job(config, [[[]]]),
        "no words": Job(config, [[without_words(rows)]]),
        "no words at all": Job(config, [[[row | empty_response() for row in rows]]]),
        "instead of no words": Job(config, [[[row for row in rows if row["member"] != 1]]]),
        "one score": Job(config, [[[row | {"score": 1.0, "grade_status": "ok"} for row in rows]]]),
        "one score, whitened": Job(
            config_for(model, AlgorithmConfig(adv_estimator="reinforce_pp_baseline")),
            [[[row | {"score": 1.0, "grade_status": "ok"} for row in rows]]],
        ),
        "not a number": Job(config, [[poisoned(rows)], deal(rows, 1)]),
        "lora": Job(lora_config(model), [deal(rollouts(i), 1) for i in range(3)]),
        "critic first": Job(warmup_config(model), [deal(rollouts(i), 1) for i in range(2)]),
    }
    return train_on_ranks(1, jobs | recipe_jobs(model, 1, 1_000_000))


def poisoned(rows: list[dict]) -> list[dict]:
    """One log-prob of an engine is not a number, and with it the gradient."""
    rows = deal(rows, 1)[0]
    usable = next(row for row in rows if row["grade_status"] == "ok")
    usable["engine_logprobs"] = [float("nan"), *usable["engine_logprobs"][1:]]
    return rows


def empty_response() -> dict:
    return {"response_ids": [], "engine_logprobs": [], "weight_versions": [], "ref_logprobs": [], "values": []}


def without_words(rows: list[dict]) -> list[dict]:
    """The second sample of each prompt ends at once."""
    return [row | empty_response() if row["member"] == 1 else row for row in rows]


def with_surplus(rows: list[dict]) -> list[dict]:
    """The last group is a prompt of the reserve; the one that it came in for was cut off, and so was another."""
    kept = [row | {"group_id": 5 if row["group_id"] == 3 else row["group_id"]} for row in rows]
    nothing = {"finish_reason": "surplus", "grade_status": "abstain", "score": float("nan")}
    cut = [
        row | nothing | {"group_id": group, "sample_id": f"cut/{group}/{i}"}
        for group in (3, 4)
        for i, row in enumerate(rows[:4])
    ]
    return deal(kept + cut, 1, seed=4)[0]


def overprovision_config(model: Path) -> Config:
    config = config_for(model)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, overprovision=0.5))


def lora_config(model: Path) -> Config:
    return dataclasses.replace(config_for(model), model=ModelConfig(path=str(model), lora_rank=4, lora_alpha=8))


def warmup_config(model: Path) -> Config:
    config = config_for(model, AlgorithmConfig(adv_estimator="gae"))
    return dataclasses.replace(config, critic=CriticConfig(warmup=2, lr=1e-2))


@pytest.fixture(scope="module")
def two_ranks(model) -> dict[str, dict]:
    config, rows = config_for(model), rollouts(0)
    failed = [row for row in rows if row["grade_status"] != "ok"]
    usable = [row for row in rows if row["grade_status"] == "ok"]
    assert len(usable) == 13
    jobs = {
        "reference": Job(config, [deal(rollouts(i), 2, seed=7) for i in range(3)]),
        "one rank has only failures": Job(config, [[usable, failed]]),
        "one rank has nothing": Job(config, [[rows, []]]),
        "weights stay gathered": Job(
            config_for(model, reshard_after_forward=False, micro_batch_tokens=28),
            [deal(rollouts(i), 2, seed=3) for i in range(3)],
            chunk=3,
        ),
        "lora": Job(lora_config(model), [deal(rollouts(i), 2, seed=7) for i in range(3)], chunk=2),
    }
    return train_on_ranks(2, jobs | recipe_jobs(model, 2, 2, micro_batch_tokens=28))


@pytest.fixture(scope="module")
def waiting(model) -> dict[str, dict]:
    return train_on_ranks(1, recipe_jobs(model, 1, 5, stream=False))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_the_same_streamed_on_two_ranks_and_all_at_once(model, one_rank, two_ranks, waiting, name):
    for other in (two_ranks, waiting):
        assert largest_difference(one_rank[name]["parameters"], other[name]["parameters"]) < 1e-5
        if "critic" in one_rank[name]:
            assert largest_difference(one_rank[name]["critic"], other[name]["critic"]) < 1e-5
        last, others = one_rank[name]["metrics"][-1], other[name]["metrics"][-1]
        assert last.keys() == others.keys()
        for metric in last.keys() - {"train/padding_frac"}:  # which depends on the micro-batches
            assert others[metric] == pytest.approx(last[metric], rel=2e-3, abs=1e-5), metric


def test_every_metric_has_a_legend_and_every_legend_a_metric(one_rank):
    found = {name for job in RECIPES for metrics in one_rank[job]["metrics"] for name in metrics}
    assert [name for name in found if legend(name) is None] == []
    of_learner = [name for name in METRICS if name.split("/")[0] in ("policy", "critic", "ref", "mismatch", "train")]
    assert [name for name in of_learner if "<" not in name and name not in found] == []


def test_groups_that_were_cut_off_change_nothing(one_rank):
    plain, surplus = one_rank["one iteration"], one_rank["one iteration with surplus"]
    assert largest_difference(plain["parameters"], surplus["parameters"]) < 1e-5
    assert surplus["metrics"][0]["train/prompts"] == 4


def test_recipes_differ(one_rank):
    found = [one_rank[name]["parameters"] for name in RECIPES]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert largest_difference(a, b) > 1e-5


@pytest.mark.parametrize("name", ["one at a time", "waits", "padded", "packed", "one long row"])
def test_arrival_and_layout_do_not_matter(one_rank, name):
    assert largest_difference(one_rank["reference"]["parameters"], one_rank[name]["parameters"]) < 1e-5


def test_the_critic_may_learn_alone_at_first(model, one_rank):
    job = one_rank["critic first"]
    assert largest_difference(job["parameters"], start_of(model)) == 0
    assert np.abs(job["critic"]["score.weight"]).max() > 0
    assert job["metrics"][1]["critic/loss"] > 0 and "policy/kl" not in job["metrics"][1]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(one_rank):
    job = one_rank["not a number"]
    assert [metrics["train/skipped_steps"] for metrics in job["metrics"]] == [1, 0]
    assert "grad_norm" not in job["metrics"][0] and all(
        np.isfinite(array).all() for array in job["parameters"].values()
    )
    assert largest_difference(job["parameters"], one_rank["reference"]["parameters"]) > 0


def test_lora_trains_the_adapters_and_exports_them_merged(model, one_rank, two_ranks):
    trained, start = one_rank["lora"]["parameters"], start_of(model)
    assert largest_difference(trained, two_ranks["lora"]["parameters"]) < 1e-5
    changed = {name for name in start if np.abs(trained[name] - start[name]).max() > 0}
    assert trained.keys() == start.keys()
    assert changed == {name for name in start if "_proj" in name}
    for name in changed:
        assert np.linalg.matrix_rank(trained[name] - start[name], tol=1e-5) <= 4


def start_of(model: Path) -> dict[str, np.ndarray]:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: parameter.detach().numpy() for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("name", ["reference", "weights stay gathered"])
def test_two_ranks_give_the_parameters_of_one(one_rank, two_ranks, name):
    one, two = one_rank["reference"], two_ranks[name]
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


def test_a_group_is_trained_on_when_nothing_else_has_come(one_rank):
    job = one_rank["a group at a time"]
    assert largest_difference(one_rank["one iteration"]["parameters"], job["parameters"]) < 1e-5
    assert [span["name"] for span in job["spans"]].count("train") >= 4


def test_sharded_training_equals_a_plain_torch_loop(model, one_rank):
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
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


def test_empty_responses_are_as_if_they_were_not_there(one_rank):
    without, instead = one_rank["no words"], one_rank["instead of no words"]
    assert largest_difference(without["parameters"], instead["parameters"]) < 1e-5
    assert without["metrics"][0]["train/prompts"] == 4


@pytest.mark.parametrize("name", ["one score", "one score, whitened"])
def test_groups_of_one_score_give_no_gradient(model, one_rank, name):
    job = one_rank[name]
    assert job["metrics"][0]["grad_norm"] < 1e-6 and job["metrics"][0]["train/skipped_steps"] == 0
    assert largest_difference(job["parameters"], start_of(model)) < 1e-6


@pytest.mark.parametrize("name", ["all failed", "no rows", "no words at all"])
def test_nothing_usable_leaves_the_parameters_alone(model, one_rank, name):
    assert largest_difference(one_rank[name]["parameters"], start_of(model)) == 0
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
        for layout in ([[row] for row in rows], [rows], [rows[:2], rows[2:3], rows[3:]]):
            with torch.no_grad():
                logprobs_N, entropy_N = policy(lay_out(layout), temperature)
            assert torch.allclose(logprobs_N, torch.cat(wanted), atol=1e-5)
            assert torch.allclose(entropy_N, torch.cat(entropies), atol=1e-4)


def test_learning_rate_schedules():
    assert [learning_rate(i, 10, 1.0, 2, "constant") for i in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert [learning_rate(i, 10, 1.0, 2, "linear") for i in (2, 6)] == [1.0, 0.5]
    assert learning_rate(6, 10, 1.0, 2, "cosine") == pytest.approx(0.5)
