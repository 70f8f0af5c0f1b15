"""Reward functions with the signatures that verl and TRL document, unchanged, by module and by file path."""

import asyncio
import inspect
import subprocess
import sys
import textwrap

import pytest

from raypipe.adapters import find_grader, load_grader

REWARDS = """
import asyncio
import functools
import re
from typing import Dict, List

BATCH_CALLS = []
SEEN = {}


# verl: one sample a call
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def compute_score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = kwargs.get("right", 1.0) if solution_str == ground_truth else -1.0
    return {"score": score, "acc": True, "who": data_source}

def compute_score_short(solution_str, ground_truth, method="strict", score=1.0):
    return score if solution_str == ground_truth or method == "flexible" and ground_truth in solution_str else 0

def uses_extra_info(data_source, solution_str, ground_truth, extra_info):
    return extra_info["bonus"]

async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)

def needs_more(data_source, solution_str, ground_truth, extra_info, threshold):
    return threshold


def compute_score_router(
    data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, concurrent_semaphore=None,
    memory_limit_mb=None, **kwargs
):
    assert concurrent_semaphore is None
    return {"score": float(solution_str == ground_truth), "url": sandbox_fusion_url, "more": sorted(kwargs)}

async def compute_score_judge(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer=None
):
    await asyncio.sleep(0)
    return {"score": 1.0, "acc": True, "asked": reward_router_address}


# verl: a batch a call
def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    BATCH_CALLS.append(len(solution_strs))
    return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]

def compute_score_batched_kwargs(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0, **kwargs):
    return [scale * (s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]

def batched_few(solution_strs):
    return [len(s) for s in solution_strs]


# TRL
def reward_len(completions, **kwargs):
    return [float(len(c)) for c in completions]

def format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    return [float(c[0]["content"].startswith("<think>") and c[0]["role"] == "assistant") for c in completions]

def format_reward_typing(completions: List[List[Dict[str, str]]], **kwargs):
    return [float(len(c[0]["content"])) for c in completions]

def untyped_messages(completions, **kwargs):
    return [c[0]["content"] for c in completions] and [1.0] * len(completions)

def reward_answer(prompts, completions, answer, **kwargs):
    return [1.0 if a == c else None for a, c in zip(answer, completions, strict=True)]

def reward_solution(completions: list[list[dict[str, str]]], solution, log_extra=None, log_metric=None, **kwargs):
    scores = [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]
    log_extra("gold", solution)
    log_metric("mean", sum(scores) / len(scores))
    return scores

def reward_columns(prompts, completions, difficulty, ground_truth):
    return [f"{p}|{c}|{d}|{g}" for p, c, d, g in zip(prompts, completions, difficulty, ground_truth, strict=True)]

async def reward_async(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if p else None for p in prompts]

# TRL's documented examples
def reward_more_tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def reward_more_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def reward_tags(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(bool(re.match(r"^<think>.*?</think><answer>.*?</answer>$", content))) for content in contents]

def reward_boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    return [float(bool(match) and match.group(1) == truth) for match, truth in zip(found, ground_truth)]

def reward_by_task(prompts, completions, task, **kwargs):
    return [float("4" in c) if t == "math" else None for p, c, t in zip(prompts, completions, task)]

async def reward_not_empty(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def dynamic(completions, trainer_state, **kwargs):
    return [trainer_state.global_step]

def everything(completions, **columns):
    SEEN.clear()
    SEEN.update(columns, completions=completions)
    return [0.0] * len(completions)

def get_length_reward(max_len: int, penalty: float = 1.0):
    def length_reward(completion_ids: list[list[int]], **kwargs):
        return [-penalty * (len(ids) > max_len) for ids in completion_ids]
    return length_reward


# classes
class Contract:
    def __init__(self, bonus=0.0):
        self.bonus = bonus
    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [self.bonus + (s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]

class Loose:
    def __call__(self, **rows):
        return [len(s) for s in rows["solution_strs"]]

class Asynchronous:
    async def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0 for _ in solution_strs]

class Single:
    def __call__(self, solution_str, ground_truth, **kwargs):
        return float(solution_str == ground_truth)

class TrlLike:
    def __init__(self, add):
        self.add = add
    def __call__(self, completions, **kwargs):
        return [len(c) + self.add for c in completions]

class NotCallable:
    pass

class Strange:
    def __call__(self, text):
        return 1.0

class Failing:
    def __init__(self):
        raise RuntimeError("no licence")

instance = Contract(bonus=10.0)
number = 3

def helper(text):
    return 1.0

def returns_text():
    return "text"

def returns_class():
    return Contract

def unwrapped(*args, **kwargs):
    return compute_score(*args, **kwargs)

@functools.wraps(compute_score)
def wrapped(*args, **kwargs):
    return compute_score(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_reward.py"
    path.write_text(REWARDS)
    return str(path)


def grade(path, solution_strs, ground_truths=None, extra_infos=None, **kwargs):
    grader = load_grader(path, kwargs)
    result = grader(
        data_sources=["d"] * len(solution_strs),
        solution_strs=solution_strs,
        ground_truths=ground_truths or ["1"] * len(solution_strs),
        extra_infos=extra_infos or [{} for _ in solution_strs],
    )
    return asyncio.run(result) if inspect.isawaitable(result) else result


def test_verl_one_sample_a_call(file):
    assert grade(f"{file}:compute_score", ["1", "2"]) == [1.0, 0.0]
    assert grade(f"{file}:wrapped", ["1", "2"]) == [1.0, 0.0]
    assert grade(f"{file}:compute_score_dict", ["1"], right=5.0) == [{"score": 5.0, "acc": True, "who": "d"}]
    assert grade(f"{file}:uses_extra_info", ["a", "b"], extra_infos=[{"bonus": 1}, {"bonus": 2}]) == [1, 2]
    assert grade(f"{file}:compute_score_async", ["1", "2"]) == [1.0, 0.0]
    assert grade(f"{file}:needs_more", ["a"], threshold=0.5) == [0.5]


def test_verl_functions_with_arguments_of_the_run(file):
    assert grade(f"{file}:compute_score_router", ["1"]) == [{"score": 1.0, "url": None, "more": []}]
    kwargs = {"reward_kwargs": {"sandbox_fusion_url": "http://s", "level": 2}}
    assert grade(f"{file}:compute_score_router", ["2"], **kwargs) == [
        {"score": 0.0, "url": "http://s", "more": ["level"]}
    ]
    assert grade(f"{file}:compute_score_judge", ["1"], reward_router_address="judge:80") == [
        {"score": 1.0, "acc": True, "asked": "judge:80"}
    ]
    with pytest.raises(ValueError, match="needs reward_router_address: give it in kwargs"):
        load_grader(f"{file}:compute_score_judge", {})


def test_verl_reward_kwargs(file):
    assert grade(f"{file}:compute_score_short", ["1", "x1"]) == [1.0, 0]
    assert grade(f"{file}:compute_score_short", ["x1"], method="flexible", score=2.0) == [2.0]
    assert grade(f"{file}:compute_score_short", ["x1"], reward_kwargs={"method": "flexible", "score": 2.0}) == [2.0]
    assert grade(f"{file}:compute_score_batched_kwargs", ["1"], reward_kwargs={"scale": 3.0}) == [3.0]


def test_verl_batch(file):
    assert grade(f"{file}:compute_score_batched", ["1", "2", "1"]) == [1.0, 0.0, 1.0]
    assert find_grader(f"{file}:compute_score_batched").__globals__["BATCH_CALLS"] == [3]
    assert grade(f"{file}:compute_score_batched_kwargs", ["1", "2"], scale=0.5) == [0.5, 0.0]
    assert grade(f"{file}:batched_few", ["1", "22"]) == [1, 2]


def test_trl_strings(file):
    assert grade(f"{file}:reward_len", ["1", "22"]) == [1.0, 2.0]
    assert grade(f"{file}:reward_answer", ["1", "2"]) == [1.0, None]
    assert grade(f"{file}:reward_async", ["a", "b"], extra_infos=[{"prompt": "p"}, {}]) == [1.0, None]
    assert grade(
        f"{file}:reward_columns", ["a", "b"], extra_infos=[{"prompt": "p", "difficulty": 3}, {"difficulty": 4}]
    ) == ["p|a|3|1", "|b|4|1"]


def test_trl_messages(file):
    messages = [{"role": "user", "content": "hi"}]
    assert grade(f"{file}:format_reward", ["<think>", "x"]) == [1.0, 0.0]  # by its annotation
    assert grade(f"{file}:format_reward_typing", ["<think>", "x"]) == [7.0, 1.0]
    assert grade(f"{file}:untyped_messages", ["a"], extra_infos=[{"prompt": messages}]) == [1.0]  # by its prompt
    assert grade(f"{file}:untyped_messages", ["a"], conversational=True) == [1.0]
    assert grade(f"{file}:reward_len", ["abc"], extra_infos=[{"prompt": messages}]) == [1.0]  # one message
    with pytest.raises(TypeError):
        grade(f"{file}:format_reward", ["a"], conversational=False)


def in_a_run(prompt, response_ids, **columns):
    """extra_info as a grader process makes it."""
    added = {"prompt_text": "<template>", "response_ids": response_ids, "response_length": len(response_ids)}
    return {"prompt": prompt, **added, **columns}


def test_trl_examples_on_prompts_that_are_text(file):
    infos = [in_a_run("The sky is", [6303, 13]), in_a_run("The sun is", [304, 279, 12884, 13])]
    blue = [" blue.", " in the sky."]
    assert grade(f"{file}:reward_more_tokens", blue, extra_infos=infos) == [2.0, 4.0]
    assert grade(f"{file}:reward_more_characters", blue, extra_infos=infos) == [6.0, 12.0]
    assert grade(f"{file}:reward_not_empty", ["a", ""], extra_infos=infos) == [1.0, 0.0]
    boxed = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    assert grade(f"{file}:reward_boxed", boxed, ["2", "5"], infos) == [1.0, 0.0]
    tasks = [in_a_run("What is 2+2?", [1], task="math"), in_a_run("Write add.", [1], task="code")]
    assert grade(f"{file}:reward_by_task", ["4", "def"], extra_infos=tasks) == [1.0, None]


def test_trl_examples_on_prompts_that_are_messages(file):
    prompts = [[{"role": "user", "content": f"What is {i} * 4?"}] for i in range(2)]
    infos = [in_a_run(prompt, [1, 2]) for prompt in prompts]
    responses = ["<think>3 * 4</think><answer>12</answer>", "It is 8."]
    assert grade(f"{file}:reward_tags", responses, extra_infos=infos) == [1.0, 0.0]
    assert grade(f"{file}:everything", responses, extra_infos=infos) == [0.0, 0.0]
    seen = find_grader(f"{file}:everything").__globals__["SEEN"]
    assert seen["prompts"] == prompts
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in responses]
    assert seen["completion_ids"] == seen["completions_ids"] == [[1, 2], [1, 2]]
    assert not seen.keys() & {"prompt", "prompt_text", "response_ids", "response_length"}


def test_trl_columns(file):
    infos = [{"prompt": "p", "level": 1}, {"solution": "own"}]
    assert grade(f"{file}:everything", ["a", "b"], ["1", "2"], infos) == [0.0, 0.0]
    seen = find_grader(f"{file}:everything").__globals__["SEEN"]
    names = ["answer", "completions", "data_source", "ground_truth", "level", "log_extra", "log_metric", "prompts"]
    assert sorted(seen) == [*names, "solution"]
    assert seen["level"] == [1, None]
    assert seen["ground_truth"] == seen["answer"] == ["1", "2"]
    assert seen["solution"] == [None, "own"]  # the data's own column comes first
    assert seen["prompts"] == ["p", ""]


def test_trl_log_extra_and_log_metric_become_named_values(file):
    assert grade(f"{file}:reward_solution", ["1", "2"]) == [
        {"gold": "1", "mean": 0.5, "score": 1.0},
        {"gold": "1", "mean": 0.5, "score": 0.0},
    ]


def test_factory(file):
    infos = [{"completion_ids": [1] * 5}, {"completion_ids": [1] * 9}]
    assert grade(f"{file}:get_length_reward", ["a", "b"], extra_infos=infos, max_len=6, penalty=0.5) == [-0.0, -0.5]
    with pytest.raises(ValueError, match=r"needs the columns \['completion_ids'\]; the rows have \['answer'"):
        grade(f"{file}:get_length_reward", ["a"], max_len=6)


def test_classes(file):
    assert grade(f"{file}:Contract", ["1", "2"], bonus=1.0) == [2.0, 1.0]
    assert grade(f"{file}:instance", ["1", "2"]) == [11.0, 10.0]
    assert grade(f"{file}:Loose", ["1", "22"]) == [1, 2]
    assert grade(f"{file}:Asynchronous", ["1"]) == [1.0]
    assert grade(f"{file}:Single", ["1", "2"]) == [1.0, 0.0]
    assert grade(f"{file}:TrlLike", ["1", "22"], add=1) == [2, 3]
    assert grade("graders.exact:ExactGrader", ["1", "2"]) == [1.0, 0.0]
    assert type(load_grader("graders.exact:ExactGrader", {})).__name__ == "ExactGrader"  # itself, not a wrapper


def test_async_graders_can_be_told_apart(file):
    for name, is_async in {
        "compute_score_async": True, "reward_async": True, "Asynchronous": True, "compute_score": False,
        "reward_len": False, "Contract": False, "compute_score_batched": False,
    }.items():  # fmt: skip
        grader = load_grader(f"{file}:{name}", {})
        found = inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(type(grader).__call__)
        assert found is is_async, name


def test_a_file_is_loaded_once_and_sees_the_files_beside_it(tmp_path):
    (tmp_path / "sibling_rewards.py").write_text("VALUE = 4.0\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('hides the standard library')\n")
    (tmp_path / "user.py").write_text(
        "import json\nfrom dataclasses import dataclass\nimport sibling_rewards\n"
        "@dataclass\nclass Config:\n    x: int = 1\n"
        "def compute_score(solution_str):\n    return sibling_rewards.VALUE\n"
    )
    path = f"{tmp_path}/user.py:compute_score"
    assert grade(path, ["a"]) == [4.0]
    assert find_grader(path) is find_grader(path)


@pytest.mark.parametrize(
    ("path", "reasons"),
    [
        ("just words", ["is not package.module:Name or path/to/file.py:name"]),
        ("", ["is not package.module:Name"]),
        ("graders.exact", ["is not package.module:Name"]),
        ("graders.exact:", ["is not package.module:Name"]),
        (":ExactGrader", ["is not package.module:Name"]),
        ("graders/exact:ExactGrader", ["is not package.module:Name"]),
        ("graders.exact:Exact Grader", ["is not package.module:Name"]),
        ("no_such_pkg_zz.rules:score", ["there is no module 'no_such_pkg_zz'"]),
        ("graders.exakt:ExactGrader", ["there is no module 'graders.exakt'", "graders has exact"]),
        ("graders.exact:ExactGradr", ["graders.exact has no 'ExactGradr'", "ExactGrader"]),
        ("math:pi", ["math:pi", "a float", "not callable"]),
        ("no_such_file.py:compute_score", ["there is no file", "no_such_file.py"]),
        ("FILE:compute_scores", ["has no 'compute_scores'", "compute_score"]),
        ("FILE:number", ["names a int", "not callable"]),
    ],
)
def test_find_grader_says_what_is_wrong(file, path, reasons):
    path = path.replace("FILE", file)
    with pytest.raises(ValueError) as error:
        find_grader(path)
    for reason in [repr(path), *reasons]:
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "reasons"),
    [
        ("Contract", {"bonsu": 1}, ["constructor has no argument 'bonsu'", "it has bonus"]),
        ("TrlLike", {}, ["constructor needs add: give it in kwargs"]),
        ("NotCallable", {}, ["instances are not callable", "__call__"]),
        ("Strange", {}, ["text", "solution_strs (a batch), solution_str (verl) or completions (TRL)"]),
        ("compute_score", {"method": 1}, ["function has no argument 'method'"]),
        ("compute_score_short", {"metod": 1}, ["function has no argument 'metod'; it has method"]),
        ("compute_score_short", {"reward_kwargs": {"metod": 1}}, ["function has no argument 'metod'; it has method"]),
        ("needs_more", {}, ["function needs threshold: give it in kwargs"]),
        ("compute_score_batched", {"conversational": True}, ["function has no argument 'conversational'"]),
        ("dynamic", {}, ["needs trainer_state"]),
        ("get_length_reward", {}, ["takes max_len, penalty", "which lack max_len"]),
        ("get_length_reward", {"max_len": 1, "penality": 1}, ["no argument 'penality'; it has penalty"]),
        ("helper", {}, ["takes text", "a reward function takes solution_strs"]),
        ("returns_text", {}, ["what it returned is not callable (str)"]),
        ("returns_class", {}, ["not callable (type)"]),
        ("unwrapped", {}, ["(*args, **kwargs)", "functools.wraps"]),
    ],
)
def test_load_grader_says_what_is_wrong(file, name, kwargs, reasons):
    with pytest.raises(ValueError) as error:
        load_grader(f"{file}:{name}", kwargs)
    for reason in [file, name, *reasons]:
        assert reason in str(error.value)


def test_what_a_constructor_raises_is_left_alone(file):
    with pytest.raises(RuntimeError, match="no licence"):
        load_grader(f"{file}:Failing", {})


def test_imports_that_fail_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_zz.py").write_text("import no_such_dependency_zz\n")
    (tmp_path / "broken_zz.py").write_text("def f(:\n")
    (tmp_path / "relative_zz.py").write_text("from . import other\n")
    for path, reason in {
        "needs_zz:f": "importing needs_zz needs 'no_such_dependency_zz', which is not installed",
        "broken_zz:f": "importing broken_zz failed: SyntaxError",
        f"{tmp_path}/needs_zz.py:f": "No module named 'no_such_dependency_zz'",
        f"{tmp_path}/broken_zz.py:f": "failed: SyntaxError",
        f"{tmp_path}/relative_zz.py:f": "relative import.*; name it as package.module:name",
    }.items():
        with pytest.raises(ValueError, match=reason):
            find_grader(path)


def test_imports_only_the_standard_library():
    code = """
        import sys
        before = set(sys.modules)
        import raypipe.adapters
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        sys.exit(", ".join(new - sys.stdlib_module_names - {"raypipe"}) or 0)
    """
    started = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
