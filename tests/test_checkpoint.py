"""Checkpoints: a run goes on from one as if nothing had happened, and transformers loads what it exported."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_ranks import in_chunks, parameters
from test_learner import config_for, rollouts
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypipe import checkpoint
from raypipe.learner import Learner
from raypipe.streaming import Spans


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path) -> Path:
    return save_model(tiny_model(tied=request.param), tmp_path / "model")


def learner_for(model: Path) -> Learner:
    return Learner(config_for(model), torch.device("cpu"))


def save(learner: Learner, folder: Path, iteration: int) -> Path:
    return checkpoint.save(folder, iteration, learner)


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(model, tmp_path):
    straight = learner_for(model)
    straight.iterate(0, in_chunks(rollouts(0), 100), Spans())
    save(straight, tmp_path / "checkpoints", 1)
    straight.iterate(1, in_chunks(rollouts(1), 100), Spans())

    resumed = learner_for(model)
    assert checkpoint.load(tmp_path / "checkpoints", resumed) == 1
    resumed.iterate(1, in_chunks(rollouts(1), 100), Spans())
    assert_same(parameters(straight.policy), parameters(resumed.policy))


def test_transformers_loads_the_export(model, tmp_path):
    learner = learner_for(model)
    learner.iterate(0, in_chunks(rollouts(0), 100), Spans())
    target = save(learner, tmp_path / "checkpoints", 1)
    loaded = AutoModelForCausalLM.from_pretrained(target / "hf")
    assert loaded.dtype == torch.float32
    assert_same(parameters(learner.policy), {name: p.detach().numpy() for name, p in loaded.named_parameters()})
    assert AutoTokenizer.from_pretrained(target / "hf").chat_template


def test_without_a_checkpoint_nothing_is_loaded(model, tmp_path):
    learner = learner_for(model)
    before = parameters(learner.policy)
    assert checkpoint.load(tmp_path, learner) == 0
    assert_same(before, parameters(learner.policy))


def test_the_newest_are_kept_and_half_ones_do_not_count(model, tmp_path):
    learner = learner_for(model)
    for iteration in (2, 10, 9):
        save(learner, tmp_path, iteration)
    (tmp_path / ".step_11.partial").mkdir()
    (tmp_path / "step_12").mkdir()  # without its progress.json, as no save leaves it
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_9", "step_10"]
    assert checkpoint.trained_iterations(tmp_path) == 10
