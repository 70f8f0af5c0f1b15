"""ReasoningGymGrader on entries that the library generates, through JSON as a data file carries them."""

import json
import subprocess
import sys

import pytest

from graders.reasoning_gym import ReasoningGymGrader, _is_plain_formula

reasoning_gym = pytest.importorskip("reasoning_gym")

TASKS = (
    "arc_1d arc_agi binary_matrix chain_sum countdown gsm_symbolic intermediate_integration maze mini_sudoku n_queens "
    "polynomial_multiplication prime_factorization products puzzle24 rearc simple_integration spell_backward "
    "spiral_matrix string_insertion tower_of_hanoi word_ladder"
).split()


def entry(task, index=0, seed=7, **config):
    return json.loads(json.dumps(reasoning_gym.create_dataset(task, size=index + 1, seed=seed, **config)[index]))


def grade(response, item, source="t", **kwargs):
    grader = ReasoningGymGrader(**kwargs)
    (result,) = grader(
        data_sources=[source],
        solution_strs=[response],
        ground_truths=[item.get("answer") if isinstance(item, dict) else None],
        extra_infos=[{"entry": item}],
    )
    return result


def value(result):
    return result["score"] if isinstance(result, dict) else result


@pytest.mark.parametrize("task", TASKS)
def test_own_answer_scores_one_and_another_less(task):
    for index in range(3):
        item = entry(task, index)
        assert grade(f"<think>hm</think>So <answer>\n{item['answer']}\n</answer>", item) == 1.0
        assert value(grade("<answer>no idea at all</answer>", item)) < 0.2
        assert value(grade("<answer>no idea at all</answer>", item, binary=True)) == 0.0


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("propositional_logic", lambda meta: meta["example_answer"]),
        ("graph_color", lambda meta: json.dumps(meta["possible_answer"])),
        ("rubiks_cube", lambda meta: meta["example_correct_answer"]),
    ],
)
def test_tasks_without_a_single_answer(task, answer):
    item = entry(task)
    assert item["answer"] is None
    assert grade(f"<answer>{answer(item['metadata'])}</answer>", item) == 1.0


def test_where_the_answer_is():
    item = entry("chain_sum")
    right = item["answer"]
    wrong = str(int(right) + 1)
    for response in (
        f"<answer>{right}</answer>",
        f"<answer>{wrong}</answer> no, <answer> {right} </answer>",
        rf"\boxed{{{wrong}}} <answer>{right}</answer>",
        rf"The sum is \boxed{{{right}}}.",
        f"  {right}\n",
        f"<think>{wrong}</think>{right}",
    ):
        assert grade(response, item) == 1.0, response
    assert grade(f"<answer>{right}</answer>", item, extract="answer_tag") == 1.0
    assert grade(right, item, extract="answer_tag") == 0.0
    assert grade(rf"<answer>{wrong}</answer>\boxed{{{right}}}", item, extract="boxed") == 1.0
    assert grade(right, item, extract="whole") == 1.0
    for response in (None, "", " ", f"<think>{right}", "<answer></answer>", f"<answer>{wrong}</answer>"):
        assert grade(response, item) == 0.0, response


def test_partial_credit_and_binary():
    item = entry("countdown")
    wrong = "<answer>1 + 1</answer>"
    assert 0.0 < grade(wrong, item) < 0.1
    assert grade(wrong, item, binary=True) == 0.0
    assert grade(f"<answer>{item['answer']}</answer>", item, binary=True) == 1.0


def test_task_is_named_by_entry_then_source_then_option():
    item = entry("chain_sum")
    del item["metadata"]["source_dataset"]
    response = f"<answer>{item['answer']}</answer>"
    assert grade(response, item, source="reasoning_gym/chain_sum") == 1.0
    assert grade(response, json.dumps(item), source="mine", task="chain_sum") == 1.0
    with pytest.raises(ValueError, match="no task 'chain_sums'; near: chain_sum"):
        grade(response, item, source="reasoning_gym/chain_sums")


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="extract='tag' is unknown: choose one of auto, answer_tag"):
        ReasoningGymGrader(extract="tag")
    with pytest.raises(ValueError, match="no task 'countdwn'; near: countdown"):
        ReasoningGymGrader(task="countdwn")
    for item in (None, {"answer": "1"}, {"question": "", "metadata": {}}, "[]", 3):
        with pytest.raises(ValueError, match=r'extra_info\["entry"\]='):
            grade("1", item)


def test_scorer_that_fails_marks_the_sample():
    item = entry("boxnet")
    assert grade('<answer>{"a": 1}</answer>', item) == {"score": 0.0, "scorer_error": 1.0}


@pytest.mark.parametrize("task", [t for t in TASKS if t not in ("arc_agi", "rearc")])
def test_answers_are_never_executed(task, tmp_path):
    item = entry(task)
    target = tmp_path / "written"
    for payload in (
        f"__import__('os').system('touch {target}')",
        f"[__import__('os').system('touch {target}')]",
        f"open('{target}', 'w')",
        f"open('{target}', 'w').write('x') + x",
        f"[c for c in [open('{target}', 'w')]]",
        f"(lambda: open('{target}', 'w'))()",
        f"eval(\"open('{target}', 'w')\")",
        f"().__class__.__base__.__subclasses__()[0] or open('{target}', 'w')",
    ):
        assert value(grade(f"<answer>{payload}</answer>", item)) < 0.2
    assert not target.exists()


def test_list_answers_keep_their_partial_credit():
    item = entry("spiral_matrix")
    as_list = "[" + ", ".join(item["answer"].split()) + "]"
    assert grade(f"<answer>{as_list}</answer>", item) == 0.1


def test_plain_formula():
    for text in ("3*x**2/2 + C", "(1 + 2.5)*4 - 7", "sin(2*x)*exp(-x)", "x^2", "1e3", "-E**x", "log(Abs(x))"):
        assert _is_plain_formula(text), text
    for text in ("x.real", "exit()", "open(1)", "S('x')", 'f"x"', "a[0]", "x = 2", "lambda: 1", "x if y else z", "x; y",
                 "__x__", "1open(2)", "o_p", "1 .real", "{1}", "x@y", "x\\y", "diff(x)", "x__", "test()"):  # fmt: skip
        assert not _is_plain_formula(text), text


def test_importing_the_file_does_not_import_the_library():
    code = "import sys, graders.reasoning_gym; sys.exit('sympy' in sys.modules or 'reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
