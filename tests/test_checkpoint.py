"""Checkpoints: a run goes on from one as if nothing had happened, and transformers loads what it exported."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_ranks import Job, in_chunks, parameters, save_checkpoint, train_on_ranks
from test_learner import config_for, deal, largest_difference, rollouts, warmup_config
from tiny_models import save_model, tiny_model
from torch.distributed.checkpoint.filesystem import FileSystem
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypipe import checkpoint, checkpoint_files
from raypipe.config import AlgorithmConfig
from raypipe.learner import Learner
from raypipe.streaming import Spans

GRPO = AlgorithmConfig()


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model(tmp_path) -> Path:
    return save_model(tiny_model(), tmp_path / "model")


def learner_for(model: Path, algorithm: AlgorithmConfig = GRPO, **train: object) -> Learner:
    return Learner(config_for(model, algorithm, **train), torch.device("cpu"))


def train(learner: Learner, iteration: int) -> dict[str, float]:
    return learner.iterate(iteration, in_chunks(rollouts(iteration), 100), Spans())["metrics"]


def save(learner: Learner, folder: Path, iteration: int) -> Path:
    return save_checkpoint(folder, iteration, learner)


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# Everything that a learner may have: KL controller, critic, both optimizers.
PPO = AlgorithmConfig(adv_estimator="gae", lam=0.9, kl_coef=0.1, kl_in="reward", kl_target=0.05)


@pytest.mark.parametrize(("tied", "algorithm"), [(False, PPO), (True, GRPO)], ids=["ppo", "grpo, tied"])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path, tied, algorithm):
    model = save_model(tiny_model(tied=tied), tmp_path / "model")
    straight = learner_for(model, algorithm)
    train(straight, 0)
    save(straight, tmp_path, 1)
    torch.rand(7)
    state, coef = torch.get_rng_state(), straight.kl_coef
    save(straight, tmp_path, 2)
    metrics = train(straight, 2)

    torch.manual_seed(99)
    resumed = learner_for(model, algorithm)
    assert checkpoint.load(tmp_path, resumed) == checkpoint.Restored(2, [], [])
    assert torch.equal(torch.get_rng_state(), state)
    assert resumed.kl_coef == coef and (coef != algorithm.kl_coef) == bool(algorithm.kl_target)
    assert train(resumed, 2) == metrics
    assert_same(parameters(straight.policy), parameters(resumed.policy))
    if straight.critic:
        assert_same(parameters(straight.critic), parameters(resumed.critic))


def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_the_other_way_round(tmp_path):
    model = save_model(tiny_model(), tmp_path / "model")
    config = config_for(model, PPO, lr=1e-4)  # see `recipe_jobs`

    def job(ranks: int, iterations: range, **changes: Path) -> Job:
        return Job(config, [deal(rollouts(i), ranks) for i in iterations], **changes)

    straight = train_on_ranks(1, {"straight": job(1, range(3)), "two": job(1, range(2), save=tmp_path / "of one")})
    two = train_on_ranks(
        2, {"two": job(2, range(2), save=tmp_path / "of two"), "rest": job(2, range(2, 3), load=tmp_path / "of one")}
    )
    rest = train_on_ranks(1, {"rest": job(1, range(2, 3), load=tmp_path / "of two")})
    assert len(list((tmp_path / "of two" / "step_2" / "state").glob("*.distcp"))) == 2
    for found in (two["rest"], rest["rest"]):
        for part in ("parameters", "critic"):
            assert largest_difference(found[part], straight["straight"][part]) < 1e-5
        assert found["metrics"][0]["ref/kl_coef"] == pytest.approx(straight["straight"]["metrics"][2]["ref/kl_coef"])


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_reach_it(model, tmp_path, monkeypatch):
    wrote = threading.Event()
    monkeypatch.setattr(checkpoint, "commit", lambda *args: (wrote.wait(30), checkpoint_files.commit(*args)))
    learner, writer = learner_for(model), None
    writer = checkpoint.CheckpointWriter(tmp_path, learner)
    train(learner, 0)
    then = parameters(learner.policy)
    writer.save(1, under_way=[9, 4])
    train(learner, 1)
    assert checkpoint_files.steps(tmp_path) == [] and writer.metrics_of_writing() == {}
    wrote.set()
    writer.wait()
    assert writer.metrics_of_writing().keys() == {"checkpoint/write_s"} and writer.notes() == []
    loaded = learner_for(model)
    assert checkpoint.load(tmp_path, loaded) == checkpoint.Restored(1, [9, 4], [])
    assert_same(parameters(loaded.policy), then)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1" / "hf")
    assert_same(then, {name: p.detach().numpy() for name, p in exported.named_parameters()})


def test_a_checkpoint_waits_for_the_metrics_of_its_last_iteration(model, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    writer = checkpoint.CheckpointWriter(tmp_path / "checkpoints", learner_for(model), metrics)
    writer.save(3)
    deadline = time.monotonic() + 30
    while not (tmp_path / "checkpoints" / ".step_3.partial" / "hf" / "tokenizer.json").exists():
        assert time.monotonic() < deadline and writer.thread.is_alive()
        time.sleep(0.01)
    metrics.write_text('{"iteration": 1}\n')
    writer.thread.join(0.5)
    assert writer.thread.is_alive() and checkpoint_files.steps(tmp_path / "checkpoints") == []
    metrics.write_text('{"iteration": 1}\n{"iteration": 2}\n')
    assert writer.wait() == ""
    assert checkpoint_files.find_start(tmp_path / "checkpoints").iteration == 3
    writer.learner.stopping = lambda: True  # the driver waits for the learner to end, then writes them
    writer.save(9)
    assert writer.wait() == ""
    assert checkpoint_files.find_start(tmp_path / "checkpoints").iteration == 9


def test_a_checkpoint_in_the_critics_warm_up_does_not_touch_the_policys_optimizer(tmp_path):
    config = warmup_config(save_model(tiny_model(), tmp_path / "model"))
    straight, saved, resumed = (Learner(config, torch.device("cpu")) for _ in range(3))
    for iteration in range(3):
        train(straight, iteration)
        train(saved, iteration)
        if iteration == 0:
            save(saved, tmp_path / "checkpoints", 1)
            assert not saved.policy.optimizer.state
    assert checkpoint.load(tmp_path / "checkpoints", resumed).iteration == 1
    for iteration in range(1, 3):
        train(resumed, iteration)
    for learner in (saved, resumed):
        assert_same(parameters(straight.policy), parameters(learner.policy))
        assert_same(parameters(straight.critic), parameters(learner.critic))


def test_settings_are_those_of_the_config_that_goes_on(model, tmp_path):
    learner = learner_for(model, weight_decay=0.1, beta2=0.9)
    train(learner, 0)
    save(learner, tmp_path, 1)
    changed = learner_for(model, weight_decay=0.2, beta2=0.99)
    checkpoint.load(tmp_path, changed)
    (group,) = changed.policy.optimizer.param_groups
    assert group["weight_decay"] == 0.2 and group["betas"] == (0.9, 0.99)
    assert next(iter(changed.policy.optimizer.state.values()))["step"] == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_checkpoint_alone(model, tmp_path, monkeypatch):
    learner = learner_for(model)
    writer = checkpoint.CheckpointWriter(tmp_path, learner)
    writer.save(1)
    writer.wait()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:  # what a write to /dev/full meets is what it meets on a full disk
        patch.setattr(FileSystem, "create_stream", lambda self, path, mode: open("/dev/full", mode))
        writer.save(2)
        failure = writer.wait()
    assert failure.startswith("checkpoint step_2 could not be written; older ones in ")
    assert "are as they were: rank 0: " in failure and "No space left on device" in failure
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert writer.notes() == [failure] and writer.notes() == []
    assert writer.metrics_of_writing()["checkpoint/failures"] == 1
    writer.save(3)
    assert writer.wait() == ""
    assert checkpoint_files.find_start(tmp_path).iteration == 3


def test_one_that_is_damaged_inside_is_passed_over(model, tmp_path):
    learner = learner_for(model)
    save(learner, tmp_path, 1)
    older = parameters(learner.policy)
    train(learner, 1)
    shard = save(learner, tmp_path, 2) / "state" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    resumed = learner_for(model)
    restored = checkpoint.load(tmp_path, resumed)
    assert restored.iteration == 1 and len(restored.notes) == 1 and "step_2 is passed over" in restored.notes[0]
    assert_same(parameters(resumed.policy), older)
    (tmp_path / "step_1" / "state" / ".metadata").unlink()
    with pytest.raises(RuntimeError, match=r"no checkpoint in .* can be loaded: .*step_2.*; .*step_1.*\.metadata"):
        checkpoint.load(tmp_path, learner_for(model))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_the_export(tied, tmp_path):
    model = save_model(tiny_model(tied=tied), tmp_path / "model")
    learner = learner_for(model)
    train(learner, 0)
    target = save(learner, tmp_path / "checkpoints", 1)
    loaded = AutoModelForCausalLM.from_pretrained(target / "hf")
    assert loaded.dtype == torch.float32
    assert_same(parameters(learner.policy), {name: p.detach().numpy() for name, p in loaded.named_parameters()})
    assert AutoTokenizer.from_pretrained(target / "hf").chat_template


def test_without_a_checkpoint_nothing_is_loaded(model, tmp_path):
    learner = learner_for(model)
    before = parameters(learner.policy)
    assert checkpoint.load(tmp_path, learner) == checkpoint.Restored(0, [], [])
    assert_same(before, parameters(learner.policy))
