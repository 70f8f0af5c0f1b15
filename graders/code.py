"""Grades programs by running them against tests, each case in a sandbox of its own.

In: responses with a Python block, and tests (`code_tests.read_tests` lists the forms). Out: the fraction of cases
passed, or 1.0 only for all of them, and the worst status over the cases.

The one design decision: model code never shares a process with what it is compared with. Its sandbox gets the code and
a call or an input; the answer comes back as plain data and is compared outside. So there is nothing inside to patch, to
read or to forge: whoever writes a false result must still know the right one.
"""

import json
import marshal
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graders.code_extract import extract_code
from graders.code_match import output_matches, value_matches
from graders.code_tests import Call, Check, Stdio, Tests, read_tests
from graders.sandbox import Isolation, Limits, Result, Sandbox, SandboxError, find_isolation

DRIVER = Path(__file__).with_name("code_driver.py").read_text()
SEVERITY = ("ok", "crash", "timeout", "killed")


def cpus() -> int:
    return len(os.sched_getaffinity(0))


class CodeGrader:
    """Scores programs by their tests.

    Each score is a dict: `score`, `status`, `passed` and `cases` (their numbers). `status` is the worst over the cases:
    "killed" (a limit on memory, output or processes) > "timeout" > "crash" (uncaught exception, exit code other than
    0, early exit, no such function) > "ok" (right or wrong); "no_code": no closed Python block in the response.
    "error": the tests or the sandbox do not work, `error` says why, and the score is None, since nothing is known.

    Args:
        all_or_nothing: score 1.0 only if all cases pass, else 0.0; the first failure saves the remaining cases.
        timeout_s: wall-clock limit of a case in seconds, from when the program starts; CPU time is limited with it.
        memory_mb: limit of a case in MiB, unless its tests say otherwise. A program that catches `MemoryError` goes on.
        processes: sandboxes at a time over all samples of a call; by default as many as there are CPUs, in a run this
            grader process's share of them (CPUs / `grade.processes`). More would make cases run out of wall-clock time.
        max_timeouts: after so many cases of one sample the others count as timed out without being run.
        allow_packages: lets programs and tests import the packages installed beside this one.
        unsafe_without_sandbox: runs model code as the calling user, with resource limits and nothing else.

    Raises:
        RuntimeError: bubblewrap is missing or does not work here; says what to do.
    """

    def __init__(
        self,
        *,
        all_or_nothing: bool = False,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        processes: int | None = None,
        max_timeouts: int = 10,
        allow_packages: bool = False,
        unsafe_without_sandbox: bool = False,
    ):
        numbers = {"timeout_s": timeout_s, "memory_mb": memory_mb, "processes": processes, "max_timeouts": max_timeouts}
        for name, value in numbers.items():
            if value is not None and value <= 0:
                raise ValueError(f"CodeGrader: {name}={value!r} must be above 0")
        self._all_or_nothing = all_or_nothing
        self._limits = Limits(wall_s=timeout_s, memory_mb=memory_mb)
        self._processes = processes or max(1, cpus() // int(os.environ.get("RAYPIPE_GRADER_PROCESSES", "1")))
        self._max_timeouts = max_timeouts
        self._allow_packages = allow_packages
        self._isolation: Isolation = "none"
        if unsafe_without_sandbox:
            warnings.warn(
                "CodeGrader(unsafe_without_sandbox=True): model-written code runs as this user, with this user's files "
                "and network. Use it only where losing this machine does not matter.",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            try:
                self._isolation = find_isolation()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}. To run model code without any protection: CodeGrader(unsafe_without_sandbox=True)"
                ) from None

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str | None],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        pool = ThreadPoolExecutor(self._processes)
        try:
            samples = [
                self._submit(pool, response, ground_truth, extra_info)
                for response, ground_truth, extra_info in zip(solution_strs, ground_truths, extra_infos, strict=True)
            ]
            return [sample if isinstance(sample, dict) else self._score(sample) for sample in samples]
        finally:
            pool.shutdown(cancel_futures=True)  # which there are only if this was interrupted

    def _submit(
        self, pool: ThreadPoolExecutor, response: str | None, ground_truth: Any, extra_info: dict[str, Any]
    ) -> "_Sample | dict[str, Any]":
        """Queues the cases of a sample, or says at once what is wrong with it."""
        try:
            tests = read_tests(ground_truth, extra_info or {})
        except ValueError as error:
            return {"score": None, "status": "error", "passed": 0, "cases": 0, "error": str(error)}
        code = extract_code(response or "", completes=bool(tests.prompt))
        if code is None:
            return {"score": 0.0, "status": "no_code", "passed": 0, "cases": len(tests.cases)}
        sample = _Sample(tests, code)
        sample.futures += [pool.submit(self._run, sample, case) for case in tests.cases]
        return sample

    def _score(self, sample: "_Sample") -> dict[str, Any]:
        outcomes = [future.result() for future in sample.futures]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        passed = sum(outcome.passed for outcome in outcomes)
        counts = {"passed": passed, "cases": len(outcomes)}
        if errors:
            return {"score": None, "status": "error", **counts, "error": errors[0]}
        score = float(passed == len(outcomes)) if self._all_or_nothing else passed / len(outcomes)
        status = max((outcome.status for outcome in outcomes), key=SEVERITY.index)
        return {"score": score, "status": status, **counts}

    def _run(self, sample: "_Sample", case: Stdio | Call | Check) -> "_Outcome":
        done = list(sample.done)
        if self._all_or_nothing and not all(outcome.passed for outcome in done):
            return _Outcome(False)
        if sum(outcome.status == "timeout" for outcome in done) >= self._max_timeouts:
            return _Outcome(False, "timeout")
        run = {Stdio: self._run_stdio, Call: self._run_call, Check: self._run_check}[type(case)]
        try:
            outcome = run(sample, case)  # type: ignore[operator]
        except _Ended as ended:
            outcome = _Outcome(False, ended.status)
        except SandboxError as error:
            outcome = _Outcome(False, error=str(error))
        sample.done.append(outcome)
        return outcome

    def _sandbox(self, limits: Limits, stdin: str = "") -> Sandbox:
        return Sandbox(
            program=DRIVER,
            stdin=stdin.encode("utf-8", "surrogatepass"),
            limits=limits,
            isolation=self._isolation,
            packages=self._allow_packages,
        )

    def _limits_of(self, tests: Tests) -> Limits:
        return replace(self._limits, memory_mb=tests.memory_mb or self._limits.memory_mb)

    def _run_stdio(self, sample: "_Sample", case: Stdio) -> "_Outcome":
        with self._sandbox(self._limits_of(sample.tests), case.stdin) as box:
            box.send(_frame({"do": "main_program", "source": sample.code}))
            result = box.wait()
        status = _status(result)
        right = status == "ok" and output_matches(result.stdout, case.expected, sample.tests.rel_tol)
        return _Outcome(right, status)

    def _run_call(self, sample: "_Sample", case: Call) -> "_Outcome":
        with self._sandbox(self._limits_of(sample.tests)) as box:
            box.send(_frame({"do": "candidate", "sources": sample.tests.sources(sample.code)}))
            _value(_receive(box))
            box.send(_frame(case.request))
            reply = _value(_receive(box))
        if "value" not in reply:
            return _Outcome(False)
        try:
            right = any(value_matches(reply["value"], wanted, sample.tests.rel_tol) for wanted in case.accepted)
        except Exception:  # not what `encode` writes: the candidate wrote it
            return _Outcome(False, "crash")
        return _Outcome(right)

    def _run_check(self, sample: "_Sample", case: Check) -> "_Outcome":
        limits = self._limits_of(sample.tests)
        with self._sandbox(limits) as box, self._sandbox(limits) as test_box:
            box.send(_frame({"do": "candidate", "sources": sample.tests.sources(sample.code)}))
            _value(_receive(box))
            test_box.send(_frame({"do": "check", "setup": case.setup, "names": case.names, "test": case.test}))
            status = "ok"
            while "call" in (message := json.loads(_receive(test_box, meanwhile=box))):
                box.send(_frame({"encoded": json.dumps(message["call"])}))
                reply = _receive(box)
                try:
                    _value(reply)
                except _Ended as raised:  # the test may expect it
                    status = raised.status
                test_box.send(_frame({"reply": reply}))
        if message["verdict"] == "broken":
            return _Outcome(False, error=f"the test is broken: {message['detail']}")
        return _Outcome(True) if message["verdict"] == "passed" else _Outcome(False, status)


@dataclass(frozen=True)
class _Outcome:
    """What came of a case."""

    passed: bool
    status: str = "ok"
    error: str = ""


@dataclass
class _Sample:
    tests: Tests
    code: str
    futures: list["Future[_Outcome]"] = field(default_factory=list)
    done: list[_Outcome] = field(default_factory=list)


class _Ended(Exception):
    """A case that ended early: its status."""

    def __init__(self, status: str):
        self.status = status


def _frame(message: dict[str, Any]) -> bytes:
    """A message to `code_driver.py`."""
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "big") + data


def _receive(box: Sandbox, meanwhile: Sandbox | None = None) -> bytes:
    line = box.receive(meanwhile)
    if line is None:
        assert box.result is not None
        status = _status(box.result)
        raise _Ended("crash" if status == "ok" else status)  # exit code 0 without a result is no success
    return line


def _value(line: bytes) -> dict[str, Any]:
    """A reply of the candidate's sandbox, which may be anything: {"value"} or {"not_plain"}; raises for {"raised"}."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        raise _Ended("crash") from None
    if not isinstance(reply, dict) or "raised" in reply:
        raise _Ended("killed" if reply == {"raised": "MemoryError"} else "crash")
    return reply


def _status(result: Result) -> str:
    if result.status != "exited":
        return result.status
    if result.returncode == 0:
        return "ok"
    last_line = result.stderr.rstrip().rpartition(b"\n")[2]
    return "killed" if last_line.startswith(b"MemoryError") else "crash"
