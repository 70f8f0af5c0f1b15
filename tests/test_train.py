"""The command end to end on real parts: vLLM, Ray Data, Ray Train. One run, and one from its model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from raypipe.metrics import legend

ROOT = Path(__file__).parent.parent
ITERATIONS = 6
SECRET = "sk-toy-0123456789abcdef"


class Workplace:
    """A folder with a tiny model, data and a config, and the runs made there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = save_model(tiny_model(), folder / "model")
        for name, count in (("train", 64), ("heldout", 8)):
            rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(count)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "run": {"name": "first", "dir": str(folder / "runs"), "iterations": ITERATIONS},
            "model": {"path": str(self.model)},
            "data": {"train_files": ["train.jsonl"], "val_files": ["heldout.jsonl"], "train_batch_size": 8,
                     "max_prompt_length": 64},
            "rollout": {"n": 8, "max_response_length": 32},
            "engine": {"max_num_seqs": 32},  # two waves, so that one is graded while the other is made
            "grade": {"graders": [{"path": f"{ROOT}/tests/toy_graders.py:LetterGrader",
                                   "kwargs": {"api_key": "${oc.env:TOY_API_KEY,''}"}}], "processes": 1},
            "train": {"lr": 2e-2, "micro_batch_tokens": 4096},
            "checkpoint": {"every": 4, "keep_last": 2},
            "log": {"dashboard": False, "timelines": [1]},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def train(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "raypipe.train", "--config", str(self.folder / "config.yaml"), *overrides]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600,
                              env=dict(os.environ, TOY_API_KEY=SECRET))  # fmt: skip

    def metrics(self, run: str) -> list[dict[str, float]]:
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def first(workplace) -> subprocess.CompletedProcess[str]:
    done = workplace.train()
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_reward_rises_on_training_and_held_out_prompts(workplace, first):
    lines = workplace.metrics("first")
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS + 1))
    assert lines[ITERATIONS - 1]["reward/mean"] > lines[0]["reward/mean"] + 0.1
    assert lines[ITERATIONS]["reward/heldout_mean"] > lines[0]["reward/heldout_mean"]
    assert "reward/mean" not in lines[ITERATIONS], "the last plan holds held-out prompts alone"


def test_learner_and_engine_agree_in_every_iteration(workplace, first):
    for line in workplace.metrics("first")[:-1]:
        assert line["mismatch/max"] < 1e-4 and line["mismatch/kl"] < 1e-4 and line["mismatch/mean"] < 1e-4
        assert line["staleness/max"] == 0
        assert line["grade/ok_frac"] == 1 and line["train/skipped_steps"] == 0


def test_grading_overlaps_generation_in_every_iteration(workplace, first):
    for line in workplace.metrics("first")[:-1]:
        assert line["overlap/first_grade_lead_s"] > 0


def test_every_metric_is_in_the_legend(workplace, first):
    names = {name for line in workplace.metrics("first") for name in line}
    assert [name for name in names if legend(name) is None] == []
    assert names >= {
        "iteration", "reward/mean", "reward/heldout_mean", "policy/kl", "policy/clip_frac", "policy/entropy",
        "mismatch/kl", "grad_norm", "lr", "response/length_mean", "response/truncated_frac", "lag/graded_p95_s",
        "idle/generate", "idle/grade", "idle/learner", "efficiency", "tokens_per_s",
    }  # fmt: skip


def test_the_run_folder_holds_what_is_needed_later(workplace, first):
    folder = workplace.folder / "runs" / "first"
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["lr"] == 2e-2
    samples = [json.loads(line) for line in (folder / "samples" / "it_000000.jsonl").read_text().splitlines()]
    assert {sample["kind"] for sample in samples} >= {"best", "worst"}
    assert json.loads((folder / "timelines" / "it_000001.json").read_text())["traceEvents"]
    assert (folder / "timelines" / "it_000001.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("checkpoints/.*")), "no half checkpoint is left"
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{ITERATIONS}"


def test_a_graders_key_is_in_no_file_and_no_output(workplace, first):
    folder = workplace.folder / "runs" / "first"
    assert "${oc.env:TOY_API_KEY}" in (folder / "config.yaml").read_text()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20 and [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in first.stdout + first.stderr


def test_memory_of_every_kind_of_process_is_told(workplace, first):
    for line in workplace.metrics("first"):
        held = {name.split("/")[1]: value for name, value in line.items() if name.startswith("memory/")}
        assert held.keys() >= {
            "driver_gib", "engine_gib", "learner_gib", "grader_host_gib", "grader_gib", "plans_gib", "ray_gib",
            "object_store_gib",
        }  # fmt: skip
        assert 0.1 < held["driver_gib"] < 4 and 0.1 < held["learner_gib"] < 4 and held["object_store_gib"] < 1


def test_checkpoint_loads_in_transformers_and_is_the_trained_model(workplace, first):
    folder = workplace.folder / "runs" / "first" / "checkpoints" / f"step_{ITERATIONS}" / "hf"
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(workplace.model, dtype=torch.float32)
    moved = max(
        float((a - b).detach().abs().max()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    )
    assert moved > 1e-3
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_name_in_use_is_refused(workplace, first):
    done = workplace.train()
    assert done.returncode == 1
    assert "run.name='first' is in use" in done.stderr and "run.resume=auto" in done.stderr


def test_nothing_is_left_running(workplace, first):
    marker = str(workplace.folder)
    left = subprocess.run(["pgrep", "-fa", marker], capture_output=True, text=True).stdout
    assert left == ""


def test_ppo_with_a_critic_a_reference_and_stale_samples(workplace, first):
    """Every part that the first run does without: the Score stage, the critic, staleness, updates in flight, prompts
    that are carried over. It starts from the model that the first run saved, which vLLM serves."""
    served = workplace.metrics("first")[-1]
    newest = max((workplace.folder / "runs/first/checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    done = workplace.train(
        "run.name=ppo", f"model.path={newest / 'hf'}", "run.iterations=3", "data.train_batch_size=16", "rollout.n=2",
        "algorithm.adv_estimator=gae", "algorithm.kl_coef=0.01", "algorithm.kl_in=reward", "critic.lr=1e-2",
        "pipeline.max_staleness=2", "pipeline.plans_ahead=2", "pipeline.inflight_update=true", "train.ranks=2",
        "train.mini_batches=2", "model.lora_rank=8", "rollout.carry_over=0.25",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the learner waits for an iteration's last sample before it trains" in done.stdout
    lines = workplace.metrics("ppo")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    # Greedy decoding of the same prompts with the same weights.
    assert lines[0]["reward/heldout_mean"] == pytest.approx(served["reward/heldout_mean"], abs=1e-6)
    for line in lines[:3]:
        assert line["samples"] == 32 and line["train/prompts"] == 16
        assert 0 <= line["staleness/max"] <= 2
        assert line.get("group/carried", 0) == (4 if line["iteration"] else 0)
        assert line["critic/loss"] > 0 and "critic/explained_variance" in line and "ref/kl" in line
        assert "idle/score" in line
    # Samples of a later iteration may all have been scored before its time began.
    assert lines[0]["idle/score"] < 1
    assert lines[0]["ref/kl"] == pytest.approx(0, abs=1e-5) and lines[2]["ref/kl"] > 1e-4
    assert max(line["staleness/max"] for line in lines[:3]) >= 1
    # Where a token's weights were the learner's, the two agree.
    assert all(line["mismatch/max"] < 1e-4 for line in lines[:3] if "mismatch/mean" in line)

    step = workplace.folder / "runs" / "ppo" / "checkpoints" / "step_3"
    critic = AutoModelForTokenClassification.from_pretrained(step / "critic")
    assert float(critic.score.weight.detach().abs().max()) > 0
    merged = AutoModelForCausalLM.from_pretrained(step / "hf", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(newest / "hf", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, step / "adapter")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)
