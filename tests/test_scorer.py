"""Scorers and the Score stage on real, tiny models: the numbers of transformers' own forward, new weights, a death."""

import asyncio
import dataclasses
import os
import signal
import time

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from test_learner import config_for, rollouts
from tiny_models import perturbed, save_model, tiny_model
from transformers import AutoModelForCausalLM

from raypipe.config import AlgorithmConfig, ScorerConfig, scorer_roles
from raypipe.modeling import load_critic
from raypipe.rows import SCORE_COLUMNS
from raypipe.scorer import scorer_names, start_scorers
from raypipe.stages.score import Score
from raypipe.weights import WeightPublisher

ALL = AlgorithmConfig(adv_estimator="gae", kl_coef=0.1, kl_in="reward", old_logprobs="scorer")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save_model(tiny_model(), tmp_path_factory.mktemp("model"))
    return dataclasses.replace(config_for(path, ALL), scorer=ScorerConfig(num_cpus=0, micro_batch_tokens=64))


@pytest.fixture(scope="module")
def scorers(config, ray_session):
    started = start_scorers(config, 0)
    ray.get([actor.ready.remote() for actors in started.values() for actor in actors])
    yield started
    for actors in started.values():
        for actor in actors:
            ray.get(actor.close.remote())
            ray.kill(actor)


def samples() -> list[dict]:
    return [row for row in rollouts(4) if row["grade_status"] == "ok"]


def expected_logprobs(model, row: dict, temperature: float) -> np.ndarray:
    ids, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"])
    with torch.no_grad():
        logprobs_TV = (model(ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, ids[0, start:, None])[:, 0].numpy()


def ask(actor, rows: list[dict], min_version: int = 0) -> list[dict]:
    return ray.get([
        actor.score.remote({k: row[k] for k in ("prompt_ids", "response_ids")} | {"min_version": min_version})
        for row in rows
    ])  # fmt: skip


def test_only_what_the_algorithm_needs_is_scored(config):
    def roles(**algorithm):
        return scorer_roles(dataclasses.replace(config, algorithm=AlgorithmConfig(**algorithm)))

    assert roles() == ()
    assert roles(kl_coef=0.1) == ("ref_logprobs",)
    assert roles(adv_estimator="gae") == ("values",)
    assert roles(old_logprobs="scorer") == ("old_logprobs",)
    assert roles(old_logprobs="learner") == ()
    assert set(scorer_names(config)) == {"ref_logprobs", "old_logprobs", "values"} <= set(SCORE_COLUMNS)


def test_logprobs_are_those_of_transformers(config, scorers):
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    rows = samples()
    for role in ("ref_logprobs", "old_logprobs"):
        for row, result in zip(rows, ask(scorers[role][0], rows), strict=True):
            wanted = expected_logprobs(model, row, config.rollout.temperature)
            np.testing.assert_allclose(result["values"], wanted, atol=1e-5)
            assert result["scorer"] == f"scorer-{role}-0" and result["start"] <= result["end"] <= time.time()


def test_a_new_critic_values_everything_at_zero(scorers):
    assert all(value == 0 for result in ask(scorers["values"][0], samples()) for value in result["values"])


def test_what_is_queued_is_scored_together_up_to_the_budget(scorers):
    rows = samples()
    passes = {(result["start"], result["end"]) for result in ask(scorers["ref_logprobs"][0], rows * 8)}
    tokens = 8 * sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    assert tokens / 64 <= len(passes) < 4 * len(rows)  # 64 tokens a pass, far fewer passes than samples


def test_a_sample_waits_for_weights_as_new_as_it_asks_for_and_a_dead_scorer_comes_back_with_them(config, scorers):
    [policy], [critic] = scorers["old_logprobs"], scorers["values"]
    early = policy.score.remote({"prompt_ids": [1, 2], "response_ids": [3], "min_version": 1})
    assert not ray.wait([early], timeout=0.3)[0]

    changed = perturbed(tiny_model())
    head = load_critic(config.model.path, config.model)
    with torch.no_grad():
        head.model.score.bias.fill_(0.25)
    publisher = WeightPublisher(bucket_bytes=30_000)
    publisher.publish(changed, 1, [policy])
    publisher.publish(head.model, 1, [critic])
    ray.get(early, timeout=20)

    def check():
        rows = samples()
        for row, result in zip(rows, ask(policy, rows, 1), strict=True):
            wanted = expected_logprobs(changed, row, config.rollout.temperature)
            np.testing.assert_allclose(result["values"], wanted, atol=1e-5)
        assert all(value == 0.25 for result in ask(critic, rows, 1) for value in result["values"])

    check()
    for actor in (policy, critic):
        os.kill(ray.get(actor.ready.remote())["pid"], signal.SIGKILL)
    check()


def test_the_stage_adds_its_columns_and_passes_on_what_is_not_trained_on(config, scorers):
    rows = rollouts(2)
    rows[1]["purpose"] = "heldout"
    names = {role: names for role, names in scorer_names(config).items() if role != "old_logprobs"}
    wanted = [row["grade_status"] == "ok" and row["purpose"] == "train" for row in rows]
    assert 0 < sum(wanted) < len(rows)
    from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS

    columns = {**PROMPT_COLUMNS, **GENERATE_COLUMNS, **GRADE_COLUMNS}
    table = pa.table({
        name: pa.array([row.get(name, 0 if name == "min_version" else None) for row in rows], dtype)
        for name, dtype in columns.items()
    })  # fmt: skip
    scored = asyncio.run(Score(names)(table)).to_pylist()
    for row, is_wanted in zip(scored, wanted, strict=True):
        length = len(row["response_ids"]) if is_wanted else 0
        assert len(row["ref_logprobs"]) == len(row["values"]) == length
        assert row["old_logprobs"] == [] and (row["scoring"] != "[]") == is_wanted
    with pytest.raises(ValueError, match=r"Score reads the columns \['score'"):
        asyncio.run(Score(names)(table.drop_columns(list(GRADE_COLUMNS))))
