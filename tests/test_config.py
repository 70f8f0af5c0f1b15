"""Configs: every mistake is refused with the key, the value and the fix; `--help` and `--dry-run` tell the rest."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import save_model, tiny_model

from raypipe import train
from raypipe.config import Config, grader_actors
from raypipe.config_file import help_text, load_config, to_yaml
from raypipe.preflight import check_model_folder, preflight
from raypipe.train import main

CASES = Path(__file__).parent / "cases" / "prompts"
EXPECTED = [case for case in json.loads((CASES / "expect.json").read_text()) if case["what"] == "config"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, model) -> Path:
    """A folder with a good config and its data; `write` other configs beside it."""
    (tmp_path / "ok.jsonl").write_bytes((CASES / "ok.jsonl").read_bytes())
    for path in CASES.glob("c*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("{{MODEL}}", str(model)))
    return tmp_path


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case["kind"])
def test_configs_of_the_cases(case, folder):
    path = folder / case["file"]
    if case["accepted"]:
        assert preflight(load_config(path)).fits
        return
    with pytest.raises(ValueError) as error:
        preflight(load_config(path))
    message = str(error.value).lower()
    for names in case.get("must_name", []):
        assert any(name.lower() in message for name in names), message


def good(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "c34_good_config.yaml", list(overrides))


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.n=0", ["rollout.n", "0", "at least 1"]),
        ("rollout.top_p=1.5", ["rollout.top_p", "1.5", "between"]),
        ("rollout.samples_per_block=3", ["rollout.samples_per_block", "3", "divide", "rollout.n=4"]),
        ("rollout.overprovision=-0.1", ["rollout.overprovision", "-0.1", "between 0 and 4"]),
        ("train.micro_batch_tokens=10", ["train.micro_batch_tokens", "10", "96"]),
        ("train.lr=.inf", ["train.lr", "inf"]),
        ("grade.workers=two", ["grade.workers", "two", "2..8"]),
        ("grade.workers=4..2", ["grade.workers", "4..2"]),
        ("grade.graders=[]", ["grade.graders", "required"]),
        ("grade.graders=[{path: a:X}, {path: b:X}]", ["grade.graders", "'X'", "name"]),
        ("grade.graders=[{path: a:X, name: mean}]", ["grade.graders", "'mean'", "name"]),
        ("grade.graders=[{kwargs: {a: 1}}]", ["path", "required"]),
        ("rollout.stop=${oc.env:HOME}", ["rollout.stop", "wrong type", "list"]),
        ("train.node_labels=${oc.env:HOME}", ["train.node_labels", "wrong type", "mapping"]),
        ("grade.graders=${oc.env:HOME}", ["grade.graders", "wrong type", "list"]),
        ("grade.graders=['${oc.env:HOME}']", ["grade.graders.0", "mapping"]),
        ("data.train_files=[{path: a:b}]", ["data.train_files.0", "{'path': 'a:b'}", "must be a text"]),
        ("engine.node_labels={pool: {a: b}}", ["engine.node_labels.pool", "{'a': 'b'}", "must be a text"]),
        ("log.timelines=[[1]]", ["log.timelines.0", "[1]", "must be a whole number"]),
        ("run.name=&a [*a]", ["run.name", "cannot be applied"]),
        ("data.train_files=[]", ["data.train_files", "required"]),
        ("data.train_files=ok.jsonl", ["data.train_files", "ok.jsonl", "list"]),
        ("run.name=a/b", ["run.name", "a/b"]),
        ("model.dtype=float16", ["model.dtype", "float16", "bfloat16"]),
        ("max_response_length=3", ["max_response_length", "rollout.max_response_length"]),
        ("rollout", ["'rollout'", "key=value"]),
        ("rollout.stop=[", ["rollout.stop"]),
    ],
)
def test_wrong_overrides_are_refused_by_name(override, names, folder):
    with pytest.raises(ValueError) as error:
        good(folder, override)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("pipeline.max_staleness=1", ["pipeline.max_staleness=1", "0"]),
        ("engine.num_gpus=0.5", ["engine.num_gpus=0.5", "leave engine.num_gpus out"]),
        ("train.gpus_per_rank=1", ["train.gpus_per_rank=1", "leave train.gpus_per_rank out"]),
        ("engine.count=2", ["train.ranks=1", "train.ranks=2"]),
        ("engine.weight_transfer=nccl", ["engine.weight_transfer=nccl", "object_store"]),
        ("engine.sleep_level=3", ["engine.sleep_level", "3", "between 1 and 2"]),
    ],
)
def test_what_does_not_go_with_engines_that_take_turns_is_refused(override, names, folder):
    assert good(folder, "pipeline.colocate=true").pipeline.colocate
    with pytest.raises(ValueError) as error:
        good(folder, "pipeline.colocate=true", override)
    for name in names:
        assert name in str(error.value)


def test_with_turns_a_scorer_has_whole_gpus_or_none(folder):
    turns = ("pipeline.colocate=true", "algorithm.kl_coef=0.01")
    assert all(good(folder, *turns, f"scorer.num_gpus={gpus}") for gpus in (-1, 0, 2))
    with pytest.raises(ValueError, match="scorer.num_gpus=0.5 with pipeline.colocate: a scorer does not sleep"):
        good(folder, *turns, "scorer.num_gpus=0.5")


def test_groups_that_may_be_cut_off_travel_whole(folder):
    assert good(folder, "rollout.overprovision=0.5").rollout.overprovision == 0.5
    with pytest.raises(ValueError, match="rollout.samples_per_block=2: a group is cut off as a whole"):
        good(folder, "rollout.overprovision=0.5", "rollout.samples_per_block=2")


def test_overrides_replace_the_file_and_keep_their_types(folder):
    config = good(folder, "train.lr=3e-6", "rollout.stop=[a, b]", "grade.workers=2..6", "grade.graders.0.max_batch=2")
    assert config.train.lr == 3e-6
    assert config.rollout.stop == ["a", "b"]
    assert grader_actors(config) == (2, 6)
    assert config.grade.graders[0].max_batch == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0  # type: ignore[misc]


def test_what_a_run_writes_down_reads_back_as_the_same_config(folder, tmp_path):
    config = good(folder, "rollout.temperature=0.7")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_paths_are_found_beside_the_config_first(folder, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "only_here.jsonl").write_text("")
    monkeypatch.chdir(elsewhere)
    config = good(folder, "data.train_files=[ok.jsonl, only_here.jsonl]")
    assert config.data.train_files == [str(folder / "ok.jsonl"), str(elsewhere / "only_here.jsonl")]


def test_every_key_is_in_the_help_with_its_meaning():
    text = help_text()
    for part in dataclasses.fields(Config):
        for field in dataclasses.fields(part.type):  # type: ignore[arg-type]
            line = next(line for line in text.splitlines() if line.split()[:1] == [f"{part.name}.{field.name}"])
            assert field.metadata["doc"] in line


def test_help_and_config_import_nothing_heavy():
    code = (
        "import sys\nfrom raypipe.train import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert "rollout.temperature" in out


def test_a_data_source_without_a_grader_is_found_before_the_run(folder):
    graders = "grade.graders=[{path: graders.math:MathGrader, data_sources: [gsm8k]}]"
    rows = '{"prompt": "a", "answer": "1", "data_source": "gsm8k"}\n', '{"prompt": "b", "answer": "1"}\n'
    (folder / "gsm8k.jsonl").write_text(rows[0])
    (folder / "mixed.jsonl").write_text(rows[0] + rows[1])
    sources = f"data.train_files=[{folder}/gsm8k.jsonl]", f"data.val_files=[{folder}/mixed.jsonl]"
    assert preflight(good(folder, graders, sources[0])).fits
    with pytest.raises(ValueError, match=r"no grader has the data sources \['default'\]"):
        preflight(good(folder, graders, *sources))


def test_samples_longer_than_the_models_context_are_found_before_the_run(folder):
    good(folder, "data.max_prompt_length=4000", "rollout.max_response_length=96", "train.micro_batch_tokens=5000")
    config = good(
        folder, "data.max_prompt_length=4000", "rollout.max_response_length=97", "train.micro_batch_tokens=5000"
    )
    with pytest.raises(ValueError, match=r"data.max_prompt_length=4000 .* 4097 tokens, .* has 4096 positions"):
        preflight(config)


def test_a_checkpoint_to_start_from_is_looked_for_before_the_run(folder):
    with pytest.raises(ValueError, match=r"run.resume=.*/maybe is no folder; .* or write auto or never"):
        preflight(good(folder, "run.resume=maybe"))


KEYS = [f"{part.name}.{f.name}" for part in dataclasses.fields(Config) for f in dataclasses.fields(part.type)]
# What a user may write by mistake: any text, and what YAML reads as another type, a number that is none, a reference.
texts = st.text(max_size=12) | st.sampled_from(
    ["null", "[]", "{}", "[{path: a:b}]", "[[1]]", "1e400", ".nan", "-.inf", "9" * 5000, "yes", "2026-11-30", "0x10",
     "&a [*a]", "!!python/object:os.system x", "${oc.env:HOME}", "${run.name}", "${", "${x", "???", "{a: {b: c}}",
     "a: b", "- 1"]
)  # fmt: skip


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([*KEYS, "grade.graders.0.path", "grade.graders.-1", "data", "", "a.b"]) | st.text(max_size=8), texts
)
def test_any_override_is_taken_or_refused_in_words(folder, key, text):
    try:
        config = good(folder, f"{key}={text}")
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(config, Config)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=80) | st.lists(st.tuples(st.sampled_from(KEYS), texts), max_size=3))
def test_any_file_is_taken_or_refused_in_words(folder, content):
    if not isinstance(content, bytes):
        lines = [f"{key.partition('.')[0]}: {{{key.partition('.')[2]}: {text}}}" for key, text in content]
        content = "\n".join(lines).encode(errors="surrogatepass")
    (folder / "any.yaml").write_bytes(content)
    with pytest.raises(ValueError) as error:  # none names a model
        load_config(folder / "any.yaml")
    assert "any.yaml" in str(error.value)


def test_a_value_that_yaml_cannot_make_is_refused_by_the_file(folder):
    (folder / "bad.yaml").write_text(f"train: {{lr: {'9' * 5000}}}")
    with pytest.raises(ValueError, match="bad.yaml: a value cannot be read: "):
        load_config(folder / "bad.yaml")


def test_dry_run_prints_the_resource_plan(folder, capsys):
    assert main(["--config", str(folder / "c34_good_config.yaml"), "--dry-run", "grade.workers=3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"grader host\W+3\W+2\W+0", out)
    assert "train: 8 prompts" in out and out.strip().endswith("fits")


def test_dry_run_says_that_an_iteration_takes_more_prompts_than_there_are(folder, capsys):
    assert main(["--config", str(folder / "c34_good_config.yaml"), "--dry-run", "data.train_batch_size=64"]) == 0
    assert "takes data.train_batch_size=64 prompts: some come more than once" in capsys.readouterr().out


def test_dry_run_finds_an_argument_that_a_grader_does_not_have(folder, capsys):
    grader = 'grade.graders=[{path: "graders.math:MathGrader", kwargs: {timout: 3}}]'
    assert main(["--config", str(folder / "c34_good_config.yaml"), "--dry-run", grader]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: grade.graders.0.path='graders.math:MathGrader'") and error.count("MathGrader'") == 1
    assert "its constructor has no argument 'timout'" in error


def test_the_folder_above_a_model_says_where_the_model_is(tmp_path):
    model = tmp_path / "checkpoints" / "step_4" / "hf"
    model.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_4"):
        with pytest.raises(ValueError, match=f"is no model folder.*did you mean {model}"):
            check_model_folder(str(folder))


def test_dry_run_says_what_does_not_fit(folder, capsys):
    assert main(["--config", str(folder / "c34_good_config.yaml"), "--dry-run", "engine.num_gpus=64"]) == 1
    assert "64 GPUs are asked for" in capsys.readouterr().out


def test_a_mistake_ends_the_command_with_one_line(folder, capsys):
    assert main(["--config", str(folder / "c34_good_config.yaml"), "rollout.m=4"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 'rollout.m=4': rollout.m is not a key") and "Traceback" not in error


def test_a_full_disk_ends_the_command_with_one_line(folder, capsys, monkeypatch):
    def run(config, inputs):
        with open("/dev/full", "w") as file:
            file.write("x")

    monkeypatch.setattr(train, "run", run)
    assert main(["--config", str(folder / "c34_good_config.yaml")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line and "run.dir=" in line and "run.resume=auto" in line


def test_unsafe_weights_are_not_read(folder, tmp_path):
    bad = tmp_path / "pickled"
    bad.mkdir()
    (bad / "config.json").write_text("{}")
    (bad / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors"):
        preflight(good(folder, f"model.path={bad}"))
