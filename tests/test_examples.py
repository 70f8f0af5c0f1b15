"""What the examples make: data that splits cleanly and can be graded, a model that a run can start from, recipes."""

import io
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from graders.reasoning_gym import ReasoningGymGrader
from raypipe.config_file import load_config
from raypipe.prompts import load_prompts
from raypipe.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

import demo  # noqa: E402
import make_demo as made  # noqa: E402
import make_reasoning_gym as gym  # noqa: E402

ONE_DIGIT_SUMS = {"max_terms": 2, "max_digits": 1}  # 10 x 10 numbers and 2 signs: 200 questions


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores(rows: list[dict], responses: list[str]) -> list[float]:
    return ReasoningGymGrader(binary=True)(
        data_sources=[row["data_source"] for row in rows],
        solution_strs=responses,
        ground_truths=[row["reward_model"]["ground_truth"] for row in rows],
        extra_infos=[row["extra_info"] for row in rows],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "demo"
    assert made.make_demo(path, steps=2)
    return path


def test_every_question_of_a_task_comes_once():
    entries = gym.unique_entries("chain_sum", 200, 0, ONE_DIGIT_SUMS)
    assert len({entry["question"] for entry in entries}) == 200
    with pytest.raises(ValueError, match="200 different questions.*ask for 201"):
        gym.unique_entries("chain_sum", 201, 0, ONE_DIGIT_SUMS)


def test_the_seed_decides_questions_and_split():
    def questions(seed: int) -> list[str]:
        return [entry["question"] for entry in gym.unique_entries("chain_sum", 50, seed, {})]

    assert questions(1) == questions(1)
    assert not set(questions(1)) & set(questions(2)), "entry i of one seed must not be entry i - 1 of the next"


def test_files_are_split_and_each_key_earns_a_full_score(tmp_path):
    arguments = "--task chain_sum --size 30 --heldout 10 --config max_terms=2 max_digits=1 --system Compute.".split()
    assert gym.main([*arguments, "--out", str(tmp_path)]) == 0
    train, heldout = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert (len(train), len(heldout)) == (30, 10)
    questions = Counter(row["prompt"][1]["content"] for row in train + heldout)
    assert max(questions.values()) == 1
    for row in train + heldout:
        entry = row["extra_info"]["entry"]
        assert row["prompt"] == [
            {"role": "system", "content": "Compute."},
            {"role": "user", "content": f"{entry['question']}\n{gym.INSTRUCTION}"},
        ]
        assert row["data_source"] == "reasoning_gym/chain_sum"
        assert row["reward_model"]["ground_truth"] == entry["answer"]
    assert scores(train, [row["reward_model"]["ground_truth"] for row in train]) == [1.0] * 30
    assert scores(train, [row["reward_model"]["ground_truth"] + "1" for row in train]) == [0.0] * 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "chain_sums"], "no such task; it has .*chain_sum"),
        (["--task", "chain_sum", "--config", "max_term=2"], "max_term"),
        (["--task", "chain_sum", "--config", "max_terms=1"], "max_terms must be >= min_terms"),
        (["--task", "chain_sum", "--config", "max_terms"], "write KEY=VALUE"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, tmp_path, capsys):
    assert gym.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["naïve 数学 \x00\n\t  two  spaces", made.PHRASES[0] + " stop\n" + made.INSTRUCTION, ""]
)
def test_tokenizer_gives_any_text_back(text, folder):
    for tokenizer in (made.demo_tokenizer(), AutoTokenizer.from_pretrained(folder / "model")):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prompt_of_the_run_is_the_prompt_of_the_warm_up(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = load_config(ROOT / "configs" / "demo.yaml").data
    rows = read(folder / "heldout.jsonl")
    prompts = load_prompts([str(folder / "heldout.jsonl")], config, tokenizer, folder)
    assert prompts.dropped == 0 and len(prompts.prompts) == made.HELDOUT
    for row, prompt in zip(rows, prompts.prompts, strict=True):
        entry = row["extra_info"]["entry"]
        assert prompt.text == f"<|user|>{made.PHRASES[0]} {entry['metadata']['word']}\n{made.INSTRUCTION}<|assistant|>"
        assert list(prompt.ids) == made.prompt_ids(made.demo_tokenizer(), entry)
        # The turns, two phrases, the space and the line's end are a token each, and so is each letter.
        assert len(prompt.ids) == 6 + len(entry["answer"].encode())


def test_chat_template_ends_an_assistant_turn():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = made.demo_tokenizer()
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>a<|assistant|>b<|eos|>"
    assert tokenizer.encode("<|eos|>") == [tokenizer.eos_token_id]


def test_demo_words_are_split_and_only_the_right_spelling_is_rewarded(folder):
    train, heldout = read(folder / "train.jsonl"), read(folder / "heldout.jsonl")
    assert (len(train), len(heldout)) == (made.TRAIN, made.HELDOUT)
    entries = gym.unique_entries(made.TASK, made.WARM_UP + made.TRAIN + made.HELDOUT, 0, made.SETTINGS)
    warm_up = {entry["question"] for entry in entries[: made.WARM_UP]}
    parts = [warm_up, *({row["extra_info"]["entry"]["question"] for row in part} for part in (train, heldout))]
    assert len(set().union(*parts)) == sum(map(len, parts)) == len(entries)
    keys = [row["reward_model"]["ground_truth"] for row in heldout]
    assert scores(heldout, keys) == [1.0] * len(keys)
    rng = random.Random(0)
    mistaken = [made.careless(key, rng) for key in keys]
    assert scores(heldout, mistaken) == [float(a == b) for a, b in zip(keys, mistaken, strict=True)]
    assert 0.1 < sum(scores(heldout, mistaken)) / len(keys) < 0.35, "start of the demo's reward"


def test_the_careless_speller_mistakes_some_letters_one_way():
    rng = random.Random(1)
    spelled = "".join(made.careless("enatsioz", rng) for _ in range(2000))
    for position, letter in enumerate("enatsioz"):
        there = Counter(spelled[position::8])
        if letter in made.HABITS:
            assert set(there) == {letter, made.HABITS[letter]}
            assert there[letter] / 2000 == pytest.approx(1 - made.CARELESSNESS, abs=0.05)
        else:
            assert set(there) == {letter}


def test_warm_up_learns_and_repeats():
    torch.set_num_threads(1)
    tokenizer = made.demo_tokenizer()
    entries = gym.unique_entries(made.TASK, 200, 0, made.SETTINGS)
    models = [made.demo_model(tokenizer) for _ in range(2)]
    first = made.warm_up(made.demo_model(tokenizer), tokenizer, entries, steps=1, batch=32)
    losses = [made.warm_up(model, tokenizer, entries, steps=40, batch=32) for model in models]
    assert losses[0] == losses[1]
    assert losses[0] < 0.6 * first


def test_labels_are_the_answers_alone():
    ids_BL, labels_BL = made.padded([[1, 2, 3], [4]], [[5, 6], [7]], pad=0)
    assert ids_BL.tolist() == [[1, 2, 3, 5, 6], [4, 7, 0, 0, 0]]
    assert labels_BL.tolist() == [[-100, -100, -100, 5, 6], [-100, 7, -100, -100, -100]]


def test_the_demo_model_loads_ends_and_is_made_once(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.dtype == torch.float32 and model.config.vocab_size == len(tokenizer) == 262
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 1.5e6
    assert not made.make_demo(folder, steps=2)
    (folder / "made_by").write_text("an earlier version")
    assert made.make_demo(folder, steps=2)
    assert [path.name for path in folder.parent.iterdir()] == ["demo"], "no half-made folder is left"


def test_a_making_that_is_broken_off_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.make_demo(tmp_path / "demo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_and_say_how_to_launch(path):
    config = load_config(path)
    head = path.read_text().split("\nrun:")[0]
    assert f"python -m raypipe.train --config configs/{path.name}" in head
    assert Path(config.model.path).is_relative_to(ROOT) and config.data.val_files
    assert config.run.name == path.stem.replace("_", "-")


def test_recipes_name_what_the_examples_make():
    config = load_config(ROOT / "configs" / "demo.yaml")
    assert Path(config.model.path) == made.FOLDER / "model"
    assert config.data.train_files == [str(made.FOLDER / "train.jsonl")]
    arithmetic = ROOT / "configs" / "smollm2_arithmetic.yaml"
    (train_file,) = load_config(arithmetic).data.train_files
    assert f"--out {Path(train_file).parent.relative_to(ROOT)}\n" in arithmetic.read_text()


def metrics_line(iteration: int, heldout: float | None) -> dict[str, float]:
    line = {"iteration": iteration, "reward/mean": 0.5, "idle/generate": 0.25, "efficiency": 0.75}
    return line if heldout is None else {**line, "reward/heldout_mean": heldout}


@pytest.mark.parametrize(
    ("rewards", "rose"),
    [([0.1, None, 0.9], True), ([0.1, 0.95, 0.8], False), ([0.4, 0.9], False), ([None, None], False), ([], False)],
)
def test_the_demo_says_whether_the_reward_rose(rewards, rose, tmp_path):
    run = RunFolder(tmp_path, resumed=True)
    for iteration, reward in enumerate(rewards):
        run.append_metrics(metrics_line(iteration, reward))
    out = io.StringIO()
    assert demo.report(Console(file=out, width=200), run, seconds=90.0) == rose
    assert ("reward rose from below 0.4" in out.getvalue()) == rose
    assert ("did NOT rise" in out.getvalue()) != rose
    assert str(run.metrics) in out.getvalue()
    assert ("0.250" in out.getvalue()) == bool(rewards), "idle/generate"


def test_a_demo_takes_a_name_of_its_own(tmp_path):
    assert demo.free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo.free_folder(tmp_path / "demo") == tmp_path / "demo-3"
