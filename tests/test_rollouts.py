"""Training from saved rollouts: what is read, that the plan passes it on, and that the model learns from it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_pipeline import config_for
from tiny_models import byte_tokenizer, save_model, tiny_model
from transformers import AutoModelForCausalLM

from raypipe.config import AlgorithmConfig, Config, DataConfig, ModelConfig, RolloutConfig
from raypipe.config_file import load_config
from raypipe.rollouts import load_rollouts
from raypipe.sample_files import write_samples_file
from raypipe.scripted import plan_run

ROOT = Path(__file__).resolve().parent.parent
RESPONSES = ["aaaa", "AAAA", "bbbb", "B1B2"]  # LetterGrader: 1, 0, 1, 0


def lines(prompts: int = 4) -> list[dict]:
    return [{"prompt": f"p{i}", "answer": str(i), "response": text} for i in range(prompts) for text in RESPONSES]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(file: str, n: int = 4, old_logprobs: str = "learner", length: int = 8) -> Config:
    return Config(
        model=ModelConfig(path="unused"),
        data=DataConfig(rollouts=[file], max_prompt_length=32),
        rollout=RolloutConfig(n=n, max_response_length=length),
        algorithm=AlgorithmConfig(old_logprobs=old_logprobs),
    )


def test_texts_become_tokens_with_an_end(tmp_path):
    tokenizer = byte_tokenizer()
    prompts = load_rollouts(config(write_jsonl(tmp_path / "r.jsonl", lines()), n=3), tokenizer).prompts
    assert [prompt.prompt for prompt in prompts] == [f'"p{i}"' for i in range(4)]
    saved = prompts[1].saved
    assert [response["response_text"] for response in saved] == RESPONSES[:3]
    assert list(saved[0]["response_ids"]) == [*tokenizer("aaaa")["input_ids"], tokenizer.eos_token_id]
    assert set(saved[0]["weight_versions"]) == {-1} and all(x != x for x in saved[0]["engine_logprobs"])


def test_tokens_and_log_probs_of_a_file_are_taken(tmp_path):
    row = {
        "sample_id": "0/0/0", "prompt_id": "p7", "data_source": "d", "member": 0, "prompt": '"p"',
        "response_text": "ab",
        "ground_truth": "null", "extra_info": "{}", "score": 1.0, "grade_status": "ok", "grades": "[]",
        "finish_reason": "length", "generate_error": "", "response_ids": [5, 6], "engine_logprobs": [-0.5, -0.25],
    }  # fmt: skip
    write_samples_file(tmp_path / "r.parquet", [row])
    (prompt,) = load_rollouts(config(f"{tmp_path}/r.parquet", 1, "engine"), byte_tokenizer()).prompts
    (saved,) = prompt.saved
    assert prompt.prompt_id == "p7" and saved["finish_reason"] == "length"
    assert list(saved["response_ids"]) == [5, 6] and list(saved["engine_logprobs"]) == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 5}, "r.jsonl, line 1: its prompt has 4 responses in data.rollouts, but rollout.n=5"),
        ({"length": 4}, "r.jsonl, line 1: the response has 5 tokens, over rollout.max_response_length=4"),
        ({"old_logprobs": "engine"}, "r.jsonl, line 1: .*no engine_logprobs.*algorithm.old_logprobs=learner"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_rollouts(config(write_jsonl(tmp_path / "r.jsonl", lines()), **changes), byte_tokenizer())


def test_rollouts_and_prompts_are_not_mixed(tmp_path):
    text = "model: {path: m}\ndata: {train_files: [t.jsonl], rollouts: [r.jsonl]}\ngrade: {graders: [{path: a:B}]}\n"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match="data.rollouts=.*with data.train_files=.*leave one of the two out"):
        load_config(tmp_path / "c.yaml")


def test_the_plan_passes_saved_responses_on_without_an_engine(tmp_path, ray_session):
    read = load_rollouts(config(write_jsonl(tmp_path / "r.jsonl", lines())), byte_tokenizer()).prompts
    run = config_for("saved", prompts=4, n=4, iterations=1)
    graders = [dataclasses.replace(run.grade.graders[0], path="toy_graders:LetterGrader")]
    run = dataclasses.replace(run, grade=dataclasses.replace(run.grade, graders=graders))
    with plan_run(run, [], read, []) as scripted:
        (rows,) = scripted.rows([scripted.feed()], 0)
    assert sorted(row["response_text"] for row in rows) == sorted(RESPONSES * 4)
    assert "saved" not in rows[0] and {row["engine"] for row in rows} == {"saved"}
    for row in rows:
        assert row["score"] == float(row["response_text"].islower())
        assert row["finish_reason"] == "stop" and len(row["response_ids"]) == 5


def logprob(folder: Path, prompt: str, response: str) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), byte_tokenizer()
    start = tokenizer(f"<|user|>{prompt}<|assistant|>")["input_ids"]
    ids = torch.tensor([start + tokenizer(response)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits.log_softmax(-1)
    return float(sum(logits[0, i - 1, ids[0, i]] for i in range(len(start), ids.shape[1])))


def test_a_run_learns_from_saved_rollouts_without_an_engine(tmp_path):
    save_model(tiny_model(), tmp_path / "model")
    write_jsonl(tmp_path / "r.jsonl", lines())
    run = {
        "run": {"name": "saved", "dir": str(tmp_path / "runs"), "iterations": 3},
        "model": {"path": "model"},
        "data": {"rollouts": ["r.jsonl"], "train_batch_size": 4, "max_prompt_length": 32},
        "rollout": {"n": 4, "max_response_length": 8},
        "algorithm": {"old_logprobs": "learner"},
        "grade": {"graders": [{"path": f"{ROOT}/tests/toy_graders.py:LetterGrader"}], "processes": 1},
        "train": {"lr": 1e-2, "micro_batch_tokens": 1024, "gpus_per_rank": 0},
        "log": {"dashboard": False, "timelines": [], "quiet": True, "loggers": []},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "raypipe.train", "--config", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "runs/saved/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3 and all(line["train/prompts"] == 4 for line in metrics)
    for line in metrics:
        assert not [name for name in line if name.startswith(("mismatch", "staleness"))], "nothing to compare with"
    trained = tmp_path / "runs/saved/checkpoints/step_3/hf"

    def gap(folder: Path) -> float:
        return logprob(folder, "p1", "aaaa") - logprob(folder, "p1", "AAAA")

    assert gap(trained) > gap(tmp_path / "model") + 1.0
