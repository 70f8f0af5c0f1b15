"""Evaluation and generation without a learner: choices, summaries and files; then both on one real vLLM engine."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import save_model, tiny_model

from raypipe import evaluate, generate
from raypipe.config import Config, EvalConfig
from raypipe.config_file import load_config
from raypipe.sample_files import read_generated, to_block

ROOT = Path(__file__).parent.parent


def row(group: int, member: int, score: float = 1.0, response: str = "4", status: str = "ok", **more) -> dict:
    values = more.pop("values", {})
    return {
        "sample_id": f"0/{group}/{member}", "group_id": group, "member": member, "prompt_id": f"p{group}",
        "data_source": "sums", "prompt": json.dumps(f"{group} + 1"), "prompt_text": f"<|user|>{group} + 1",
        "response_text": response, "ground_truth": '"4"',
        "extra_info": '{"index": 1}', "score": score if status == "ok" else math.nan, "grade_status": status,
        "grades": json.dumps([{"grader": "g", "status": status, "score": score, "values": values}]),
        "finish_reason": "stop", "generate_error": "", "prompt_length": 3, "response_length": 1, **more,
    }  # fmt: skip


def test_keep_chooses():
    rows = [row(0, 0, 0.2), row(0, 1, 0.9), row(0, 2, 0.9), row(1, 0, status="timeout"), row(2, 0, 0.5)]
    assert generate.select(rows, "all") == rows
    assert [r["sample_id"] for r in generate.select(rows, "best")] == ["0/0/1", "0/2/0"]
    assert [r["sample_id"] for r in generate.select(rows, "score>=0.5")] == ["0/0/1", "0/0/2", "0/2/0"]
    assert generate.select(rows, "score >= -1e-3") == [r for r in rows if r["grade_status"] == "ok"]
    for wrong in ("", "worst", "score>0.5", "score>=x", "score>=1.2.3", "best,all"):
        with pytest.raises(ValueError, match="--keep .* write all, best"):
            generate.select(rows, wrong)


def test_answers_are_the_graders_or_the_whole_response():
    named = [
        row(0, 0, values={"answer": 42}),
        row(0, 1, values={"extracted": "42"}),
        row(0, 2, values={"answer": None}),
    ]
    assert evaluate.answers(named) == ["42", "42", None]
    plain = [row(0, 0, response="The  answer\nis É "), row(0, 1, response="the answer is e\u0301")]
    assert evaluate.answers(plain) == ["the answer is é"] * 2


def test_summary_by_data_source():
    config = Config(eval=EvalConfig(n=2, temperature=1.0, pass_score=0.5))
    rows = [row(0, 0, 1.0), row(0, 1, 0.4), row(1, 0, 0.6), row(1, 1, status="error"),
            row(2, 0, 0.0, data_source="code", finish_reason="length"), row(2, 1, 0.0, data_source="code")]  # fmt: skip
    parts = evaluate.summarize(config, rows)["data_sources"]
    assert list(parts) == ["code", "sums", "all"]
    sums = parts["sums"]
    assert sums["avg@2"]["value"] == pytest.approx((0.7 + 0.6) / 2)
    assert sums["pass@1"]["value"] == pytest.approx((0.5 + 1) / 2)
    assert sums["pass@2"] == sums["pass@2"] | {"value": 1.0, "prompts": 1}
    assert sums["statuses"] == {"ok": 3, "error": 1}
    assert parts["code"]["pass@2"]["value"] == 0 and parts["code"]["truncated"] == 1
    assert parts["all"]["prompts"] == 3 and parts["all"]["samples"] == 6
    json.dumps(parts, allow_nan=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.n=4"], "eval.n=4 with eval.temperature=0"),
        (["data.val_files=[]"], "data.val_files is empty"),
        (["eval.top_p=0"], "eval.top_p"),
        (["grade.graders=[]"], "grade.graders is required"),
    ],
)
def test_a_wrong_setting_is_named(workplace, overrides, message, capsys):
    assert evaluate.main(["--config", str(workplace / "config.yaml"), *overrides]) == 1
    assert message in capsys.readouterr().err


def test_generate_names_a_wrong_out_before_it_starts(workplace, capsys, tmp_path):
    arguments = ["--config", str(workplace / "config.yaml"), "--out"]
    (tmp_path / "there.jsonl").write_text("")
    for out, message in (
        (tmp_path / "x.csv", "must end in .parquet or .jsonl"),
        (tmp_path / "there.jsonl", "is there already"),
        (tmp_path / "no" / "x.jsonl", "there is no folder"),
    ):
        assert generate.main([*arguments, str(out)]) == 1
        assert message in capsys.readouterr().err


def test_help_answers_without_heavy_imports():
    for command in ("evaluate", "generate", "report"):
        code = (
            f"import sys; from raypipe.{command} import main\n"
            "try: main(['--help'])\nexcept SystemExit: pass\n"
            "print('heavy:', [m for m in ('torch', 'ray', 'vllm', 'numpy') if m in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "--" in done.stdout
        # report reads metrics' legend, which needs numpy
        assert "heavy: []" in done.stderr or (command == "report" and "heavy: ['numpy']" in done.stderr), done.stderr


# On a real engine


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    save_model(tiny_model(), folder / "model")
    for name, count in (("train", 12), ("heldout", 10)):
        rows = [
            {"prompt": f"{name} {i}", "answer": str(i), "data_source": ("a", "b")[i % 2], "extra_info": {"index": i}}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "tiny", "dir": str(folder / "runs")},
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "val_files": ["heldout.jsonl"], "max_prompt_length": 64},
        "rollout": {"n": 4, "max_response_length": 16},
        "eval": {"max_response_length": 24},
        "grade": {"graders": [{"path": f"{ROOT}/tests/toy_graders.py:LetterGrader"}], "processes": 1},
        "train": {"micro_batch_tokens": 4096},
        "log": {"dashboard": False, "quiet": True},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def key(row: dict) -> str:
    return f"{row['prompt_id']}/{row['member']}"


@pytest.fixture(scope="module")
def made(workplace, ray_session) -> Path:
    """One engine start: an evaluation with samples, a greedy one, its repetition, and a generation."""
    from raypipe.pipeline import build_plan
    from raypipe.preflight import preflight_sampling
    from raypipe.residents import ResidentActors

    def config(*overrides: str) -> Config:
        return load_config(workplace / "config.yaml", list(overrides), evaluate.check_evaluation)

    sampled = config("eval.n=4", "eval.temperature=1.0", "eval.pass_score=0.5")
    prompts, demands = preflight_sampling(sampled, sampled.data.val_files)
    train, _ = preflight_sampling(sampled, sampled.data.train_files)
    with ResidentActors(sampled, demands) as actors:
        evaluate.evaluate(sampled, prompts.prompts, actors, workplace / "sampled", 0)
        for i, name in enumerate(("greedy", "again"), start=1):
            evaluate.evaluate(config(), prompts.prompts, actors, workplace / name, i)
        generate.generate(sampled, train.prompts, actors, workplace / "all.parquet", "all", 3)
        generate.generate(sampled, train.prompts, actors, workplace / "best.jsonl", "best", 4)
        # What raypipe.grade does with the file, on the graders that are there.
        block = to_block(read_generated([str(workplace / "all.parquet")], {}))
        regraded = build_plan("again", [block], actors.workers, ["grade"]).take_all()
        scores = {key(row): row["score"] for row in regraded}
        (workplace / "again.json").write_text(json.dumps(scores))
    return workplace


def test_evaluation_writes_every_sample_and_a_summary(made):
    summary = json.loads((made / "sampled" / "summary.json").read_text())
    rows = pq.read_table(made / "sampled" / "samples.parquet").to_pylist()
    assert len(rows) == 40 and [r["member"] for r in rows[:4]] == [0, 1, 2, 3]
    assert {r["grade_status"] for r in rows} == {"ok"}
    assert summary["model"] == str(made / "model") and list(summary["data_sources"]) == ["a", "b", "all"]
    overall = summary["data_sources"]["all"]
    assert overall["avg@4"]["value"] == pytest.approx(sum(r["score"] for r in rows) / 40)
    assert overall["pass@1"]["value"] == pytest.approx(sum(r["score"] >= 0.5 for r in rows) / 40)
    assert overall["pass@1"]["value"] <= overall["pass@2"]["value"] <= overall["pass@4"]["value"]
    for found in overall.values():
        if isinstance(found, dict) and "low" in found:
            assert found["low"] <= found["value"] <= found["high"]
    lengths = [r["response_length"] for r in rows]
    assert 16 < max(lengths) <= 24, "eval.max_response_length holds, not rollout's"


def test_greedy_evaluation_repeats(made):
    responses = [
        pq.read_table(made / name / "samples.parquet", columns=["prompt_id", "response"]).to_pylist()
        for name in ("greedy", "again")
    ]
    assert responses[0] == responses[1] and len(responses[0]) == 10


def test_generated_samples_are_graded_again_to_the_same_scores(made):
    rows = pq.read_table(made / "all.parquet").to_pylist()
    assert len(rows) == 48 and max(r["response_length"] for r in rows) <= 16
    for row in rows:
        assert len(row["response_ids"]) == len(row["engine_logprobs"]) == row["response_length"]
        assert json.loads(row["extra_info"]).keys() == {"index"}
    best = [json.loads(line) for line in (made / "best.jsonl").read_text().splitlines()]
    assert len(best) == 12 and len({r["prompt_id"] for r in best}) == 12
    again = json.loads((made / "again.json").read_text())
    assert again == pytest.approx({key(r): r["score"] for r in rows})
