"""The commands as functions, and the plan a stage at a time, on real engines and graders."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import save_model, tiny_model

import raypipe
from raypipe import api
from raypipe.config import Config, GraderConfig
from raypipe.residents import actors_of
from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, SCORE_COLUMNS
from raypipe.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
GRADER = f"{ROOT}/tests/toy_graders.py:LetterGrader"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    save_model(tiny_model(), folder / "model")
    rows = [{"prompt": f"prompt {i}", "answer": str(i)} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "api", "dir": str(folder / "runs"), "iterations": 1},
        "model": {"path": "model"},
        "data": {"train_files": ["prompts.jsonl"], "val_files": ["prompts.jsonl"], "train_batch_size": 4,
                 "max_prompt_length": 64},
        "rollout": {"n": 2, "max_response_length": 12},
        "engine": {"num_gpus": 0, "max_num_seqs": 8},
        "grade": {"graders": [{"path": GRADER}], "processes": 1},
        "algorithm": {"kl_coef": 0.1},
        "train": {"micro_batch_tokens": 1024, "gpus_per_rank": 0},
        "scorer": {"num_gpus": 0},
        "log": {"dashboard": False, "quiet": True, "loggers": []},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_importing_raypipe_loads_nothing_heavy():
    code = (
        "import sys, raypipe; raypipe.Config, raypipe.load_config, raypipe.api;"
        "print([name for name in ('torch', 'ray', 'vllm', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        raypipe.Pipelin  # noqa: B018


def test_a_mistake_is_told_before_anything_starts(workplace):
    with pytest.raises(ValueError, match="rollout.m is not a key"):
        raypipe.Pipeline(workplace / "config.yaml", ["rollout.m=1"])
    with pytest.raises(ValueError, match="data.train_files is required"):
        api.train(workplace / "config.yaml", ["data.train_files=[]"])
    with pytest.raises(ValueError, match="overrides go with a file"):
        api.evaluate(raypipe.load_config(workplace / "config.yaml"), ["eval.n=2"])
    with pytest.raises(ValueError, match="model.path|grade.graders"):
        api.generate(Config())
    with pytest.raises(ValueError, match="--keep 'worst'"):
        api.generate(workplace / "config.yaml", keep="worst")
    with pytest.raises(ValueError, match="no module 'graders.maths'"):
        api.grade([], "graders.maths:MathGrader")


def test_rows_and_files_are_graded(workplace, tmp_path, ray_session):
    rows = [{"prompt": "6*7?", "answer": "42", "response": f"It is {answer}."} for answer in (42, 41)]
    graded = api.grade(rows, GraderConfig(path="graders.math:MathGrader"), processes=1, out=tmp_path / "out.parquet")
    assert [row["score"] for row in graded] == [1.0, 0.0]
    again = api.grade(str(tmp_path / "out.parquet"), "graders.exact:ExactGrader", processes=1)
    assert [json.loads(row["ground_truth"]) for row in again] == ["42", "42"]
    assert [row["score"] for row in again] == [0.0, 0.0] and {row["grade_status"] for row in again} == {"ok"}


def test_the_plan_a_stage_at_a_time(workplace, ray_session):
    with raypipe.Pipeline(workplace / "config.yaml") as pipeline:
        by_hand = pipeline.generate(["What?", {"prompt": "And?", "answer": "yes"}], n=3)
        assert by_hand["member"].to_pylist() == [0, 1, 2] * 2
        assert by_hand["ground_truth"].to_pylist() == ["null"] * 3 + ['"yes"'] * 3
        assert set(by_hand.column_names) >= set(GENERATE_COLUMNS) and "score" not in by_hand.column_names
        generated = pipeline.generate(4)
        assert generated.num_rows == 8 and set(generated["finish_reason"].to_pylist()) <= {"stop", "length"}
        graded = pipeline.grade(generated)
        assert graded.select(generated.column_names).equals(generated)
        for row in graded.to_pylist():
            text = row["response_text"]
            assert row["score"] == sum("a" <= char <= "z" for char in text) / max(1, len(text))
        scored = pipeline.score(graded)
        assert set(scored.column_names) == set(graded.column_names) | set(SCORE_COLUMNS)
        for row in scored.to_pylist():  # the reference is the model that sampled
            assert row["ref_logprobs"] == pytest.approx(row["engine_logprobs"], abs=1e-3)
        whole = pipeline.run(4)
        assert set(whole.column_names) == set(scored.column_names)
        assert whole["response_ids"].equals(scored["response_ids"]), "the same seeds"
        with pytest.raises(ValueError, match="run.name='api' is at work in this Ray already .*api/engine-0.*close"):
            api.evaluate(workplace / "config.yaml")
        assert whole["score"].equals(scored["score"])


def test_saved_responses_are_graded_without_an_engine(workplace, ray_session):
    config = raypipe.load_config(workplace / "config.yaml", ["algorithm.kl_coef=0"])
    pipeline = raypipe.Pipeline(config)
    graded = pipeline.grade([{"prompt": "?", "response": "abAB"}, {"prompt": "?", "response": "AB"}])
    assert isinstance(graded, pa.Table) and set(graded.column_names) >= set(GRADE_COLUMNS)
    assert graded["score"].to_pylist() == [0.5, 0.0] and graded["group_size"].to_pylist() == [2, 2]
    assert "_engines" not in vars(pipeline)
    with pytest.raises(ValueError, match="no Score stage.*algorithm.kl_coef"):
        pipeline.score(graded)
    pipeline.close()


SCRIPT = """
import ray
from raypipe import api
rows = [{"prompt": "?", "answer": "42", "response": text} for text in ("42", "41")]
for _ in range(2):
    print([row["score"] for row in api.grade(rows, "graders.exact:ExactGrader", processes=1)], ray.is_initialized())
"""


def test_in_a_script_each_call_has_a_ray_of_its_own():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == ["[1.0, 0.0] False"] * 2


@pytest.fixture(scope="module")
def training(workplace, ray_session) -> tuple[RunFolder, str]:
    """A run in a Ray that was there before, as in a notebook, and what it printed; engines and learner take turns. On a
    machine without GPUs nothing is freed by that, but the order is the same."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        folder = api.train(
            workplace / "config.yaml",
            ["algorithm.kl_coef=0", "data.val_files=[]", "run.iterations=2", "pipeline.colocate=true",
             "rollout.overprovision=0.25", "rollout.n=4", "rollout.max_response_length=32", "engine.max_num_seqs=4",
             "engine.num_gpus=-1", "train.gpus_per_rank=-1", "log.timelines=[0, 1]", "log.quiet=false"],
        )  # fmt: skip
    return folder, printed.getvalue()


def test_engines_and_learner_take_turns_and_extra_prompts_are_cut_off(training):
    trained, printed = training
    assert "pipeline.colocate: engines and learner take turns" in printed
    lines = trained.read_metrics()
    assert [line["iteration"] for line in lines] == [0, 1]
    for iteration, line in enumerate(lines):
        assert (line["samples"], line["train/prompts"], line["group/surplus"]) == (16, 4, 1)
        assert line["mismatch/max"] < 1e-4 and line["staleness/max"] == 0
        assert line["overlap/first_grade_lead_s"] > 0
        trace = json.loads((trained.path / f"timelines/it_{iteration:06d}.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        generated = [event["ts"] + event["dur"] for event in events if event["cat"].startswith("Generate")]
        learner = [event["ts"] for event in events if event["name"] in ("train", "update weights")]
        assert len(learner) == 2 and max(generated) <= min(learner)


def test_the_trained_model_is_evaluated_and_sampled(workplace, training, tmp_path):
    model, out = f"model.path={training[0].checkpoints}/step_2/hf", tmp_path / "best.parquet"
    summary = api.evaluate(workplace / "config.yaml", [model, "eval.n=2", "eval.temperature=1.0"])
    assert summary["data_sources"]["default"]["avg@2"]["prompts"] == 6
    samples = api.generate(workplace / "config.yaml", [model], out=out, keep="best")
    assert pq.read_table(out)["score"].to_pylist() == [sample["score"] for sample in samples] and len(samples) == 6
    assert actors_of("api") == []
