"""Feeds hostile programs to CodeGrader and hostile answers to MathGrader, and counts what they leave behind.

    python examples/bench/hostile.py [--n 10000 | --quick] [--processes 2]

In: a seed. Out: progress, then one line of JSON; the exit code is 1 unless all of these are zero:

    processes_left     processes of any sandbox that still exist, zombies included
    files_left         files in the temporary folder or in the directory that the programs try to write to
    ports_open         ports that the programs try to listen on and that can be connected to from outside
    connections        connections that reached a server of this process
    open_files_growth  descriptors of this process at the end, less those after the first tenth
    wrong_scores       programs and answers that scored otherwise than they deserve (`late`, right programs that a busy
                       machine did not finish in time, are counted apart)

and unless `rss_growth_mb`, this process's memory at the end less that after the first tenth, is below 20.

Each kind has parameters that are drawn anew for every program, half the programs are right beside being hostile, and a
third of the answers are.
"""

import argparse
import json
import os
import random
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from graders import code as code_module
from graders.code import CodeGrader
from graders.math import MathGrader
from graders.process_watch import process_tree

BATCH = 100
PORTS = range(47100, 47200)
RSS_LIMIT_MB = 20.0

# Each is followed by the program that solves the task, or not ("{solve}"). {n}: a number, {outside}: a directory of the
# host, {port}: of a listening server, {listen}: a port to listen on. The score: None where {solve} decides.
STDIO_KINDS: dict[str, tuple[str, float | None]] = {
    "write_outside": ("try: open('{outside}/{n}', 'w').write('x')\nexcept OSError: pass\n{solve}", None),
    "write_everywhere": (
        "import os\nfor d in ('/', '/usr', '/dev', '/etc', '/proc', '/root', '/home', '/var/tmp'):\n"
        "    try: open(d + '/mark{n}', 'w').write('x')\n    except OSError: pass\n{solve}",
        None,
    ),
    "fill_disk": (
        "try:\n    for i in range({n}): open(str(i), 'wb').write(b'x' * 2**24)\nexcept OSError: pass\n{solve}", None,
    ),
    "connect": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 1)\nexcept OSError: pass\n{solve}", None,
    ),
    "listen": (
        "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', {listen}))\ns.listen()\n{solve}", None,
    ),
    "forks": ("import os, time\nfor _ in range({n}):\n    if os.fork() == 0: time.sleep(60)\n{solve}", None),
    "fork_bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", 0.0),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
        "{solve}",
        None,
    ),
    "subprocess": (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)  # {mark}'], "
        "start_new_session=True)\n{solve}",
        None,
    ),
    "ignored_signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "{solve}",
        None,
    ),
    "kill_others": ("import os\nfor p in (os.getppid(), 1, -1):\n    try: os.kill(p, 9)\n    except: pass", 0.0),
    "memory": ("b = bytearray({n} * 2**30)", 0.0),
    "caught_memory": ("try: b = bytearray({n} * 2**30)\nexcept MemoryError: pass\n{solve}", None),
    "endless_output": ("while True: print('spam' * {n})", 0.0),
    "noise": ("import sys\nsys.stderr.write('noise ' * 1000 * {n})\n{solve}", None),
    "binary": ("import sys\nsys.stdout.buffer.write(bytes(range(256)) * {n})", 0.0),
    "exit": ("import os\nos._exit({n} % 2)\n{solve}", 0.0),
    "signal": ("import os\nos.kill(os.getpid(), {n} % 15 + 1)\nimport time; time.sleep(60)", 0.0),
    "recursion": ("def f(): f()\nf()", 0.0),
    "closed_streams": ("import os\nos.closerange(0, {n})", 0.0),
    "null": ("print({n}\0)", 0.0),
    "not_utf8": ("x = '\udc80'\n{solve}", 0.0),
    "hang": ("while True: pass", 0.0),
    "sleep": ("import time; time.sleep({n} * 100)", 0.0),
}  # fmt: skip
RARE = {"hang", "sleep", "fork_bomb", "signal"}  # each takes its whole time limit, or much of the machine
CALL_KINDS: dict[str, tuple[str, float | None]] = {
    "equal_to_all": ("class E:\n    def __eq__(self, other): return True\ndef f(n): return E()", 0.0),
    "lying_number": ("class I(int):\n    def __eq__(self, other): return True\ndef f(n): return I({n})", 0.0),
    "patched": ("import builtins, json\nbuiltins.all = lambda x: True\njson.dumps = lambda *x: 'true'\n{solve}", None),
    "forged": (
        "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'{{\"value\":{n},\"score\":1}}\\n' * 9)\n"
        "    except OSError: pass\ndef f(n): return None",
        0.0,
    ),
    "long_result": ("def f(n): return 10 ** ({n} * 9999)", 0.0),
    "deep_result": ("def f(n):\n    for _ in range({n} * 999): n = [n]\n    return n", 0.0),
    "spy": (
        "import gc\ndef f(n):\n    for o in gc.get_objects():\n"
        "        if type(o) is dict and o.get('args') == [n] and 'expected' in o: return o['expected']",
        0.0,
    ),
    "exit_in_call": ("import os\ndef f(n): os._exit(0)", 0.0),
    "raises": ("def f(n): raise [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError][{n} % 4]", 0.0),
    "threads": (
        "import threading as t, time\nfor _ in range({n} // 5): t.Thread(target=time.sleep, args=[9]).start()\n{solve}",
        None,
    ),
}  # fmt: skip
SOLVE_STDIO = {True: "print(int(input()) * 3)", False: "print(-1)"}
SOLVE_CALL = {True: "def f(n): return n * 3", False: "def f(n): return -1"}
ANSWERS: dict[str, Callable[[random.Random, str], str]] = {
    "nested": lambda rng, x: r"\boxed{" + "{" * (depth := rng.randrange(1, 3000)) + x + "}" * depth + "}",
    "unclosed": lambda rng, x: r"\boxed{" * rng.randrange(1, 3000) + x,
    "tower": lambda rng, x: r"\boxed{" + "^".join(["9"] * rng.randrange(3, 300)) + "}",
    "fractions": lambda rng, x: r"\boxed{" + r"\frac{1}{" * (d := rng.randrange(1, 900, 2)) + x + "}" * d + "}",
    "digits": lambda rng, x: r"\boxed{" + str(rng.randrange(1, 10)) * rng.randrange(5000, 50000) + "}",
    "factorial": lambda rng, x: rf"\boxed{{{rng.randrange(10**6, 10**9)}!}}",
    "huge_range": lambda rng, x: rf"\boxed{{\sum_{{i=1}}^{{10^{{{rng.randrange(9, 99)}}}}} i}}",
    "spaces": lambda rng, x: "answer is " + " " * rng.randrange(10**4, 10**5) + "?",
    "code": lambda rng, x: r"\boxed{__import__('os').system('touch " + f"{x}" + "')}",
    "brackets": lambda rng, x: r"\boxed{" + "(" * rng.randrange(1, 3000) + "}",
    "roots": lambda rng, x: r"\boxed{" + r"\sqrt{" * (d := rng.randrange(1, 900)) + "2" + "}" * d + "}",
    "unicode": lambda rng, x: "".join(chr(rng.randrange(32, 0xD800)) for _ in range(rng.randrange(1, 2000))) + ".",
    "right": lambda rng, x: rf"so \boxed{{{x}}}",
    "right_after_noise": lambda rng, x: r"\boxed{" * rng.randrange(0, 50) + rf"0}} but finally \boxed{{{x}}}",
    "right_padded": lambda rng, x: r"\boxed{" + " " * rng.randrange(1, 5000) + x + "}",
}


def program(rng: random.Random, places: dict[str, object]) -> tuple[str, dict[str, object], float]:
    """A response with a hostile program, its tests and the score it deserves."""
    stdio = rng.random() < 0.65
    kinds = STDIO_KINDS if stdio else CALL_KINDS
    name = rng.choice([kind for kind in kinds if kind not in RARE or rng.random() < 0.1])
    template, score = kinds[name]
    right = rng.random() < 0.5
    solve = (SOLVE_STDIO if stdio else SOLVE_CALL)[right]
    source = template.format(n=rng.randrange(3, 30), solve=solve, listen=rng.choice(PORTS), **places)
    number = rng.randrange(10**6)
    if stdio:
        tests: dict[str, object] = {"type": "stdio", "cases": [{"input": f"{number}\n", "output": f"{number * 3}\n"}]}
    elif rng.random() < 0.5:
        tests = {"type": "call", "fn": "f", "cases": [{"args": [number], "expected": number * 3}]}
    else:
        tests = {"type": "assert", "cases": [f"assert f({number}) in ({number * 3},)"]}
    return f"```python\n{source}\n```", {**tests, "memory_mb": 512}, float(right) if score is None else score


def answer(rng: random.Random) -> tuple[str, str, float]:
    """A hostile answer, its key and the score it deserves."""
    key = str(rng.randrange(10, 10**6))
    kind = rng.choice(list(ANSWERS))
    return ANSWERS[kind](rng, key), key, float(kind.startswith("right") or kind == "nested")


class Traces:
    """What the programs could leave, and how much of it there is."""

    def __init__(self, directory: str):
        self.mark = f"mark-{uuid.uuid4()}"
        self.outside, self.temporary = Path(directory, "outside"), Path(directory, "temporary")
        self.outside.mkdir(mode=0o777)
        self.temporary.mkdir()
        self.outside.chmod(0o777)  # whatever the umask
        tempfile.tempdir = str(self.temporary)
        code_module.DRIVER += f"# {self.mark}"  # which is in the command line of all processes of a sandbox
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.zombies = self.count_zombies()

    def places(self) -> dict[str, object]:
        return {"outside": self.outside, "port": self.server.getsockname()[1], "mark": self.mark}

    def count_processes(self) -> int:
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += self.mark.encode() in path.read_bytes()
            except OSError:
                continue
        return found + len(process_tree(os.getpid())) - 1 + max(0, self.count_zombies() - self.zombies)

    def count_zombies(self) -> int:
        found = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                found += "(bwrap) Z" in path.read_text(errors="replace")
            except OSError:
                continue
        return found

    def count_files(self) -> int:
        return len(list(self.outside.iterdir())) + len(list(self.temporary.iterdir()))

    def count_connections(self) -> int:
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return 0
        return 1 + self.count_connections()

    def count_ports(self) -> int:
        found = 0
        for port in PORTS:
            with socket.socket() as probe:
                found += probe.connect_ex(("127.0.0.1", port)) == 0
        return found


def own_use() -> tuple[float, int]:
    """MiB of memory and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000, help="programs and answers in all, four programs to an answer")
    parser.add_argument("--quick", action="store_true", help="the same as --n 300")
    parser.add_argument("--processes", type=int, default=None, help="sandboxes at a time; default: one for each CPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = 300 if options.quick else options.n
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        report = run(count, random.Random(options.seed), options.processes, Traces(directory))
    print(json.dumps(report))
    zero = ("processes_left", "files_left", "ports_open", "connections", "open_files_growth", "wrong_scores")
    sys.exit(any(report[name] for name in zero) or report["rss_growth_mb"] > RSS_LIMIT_MB)


def run(count: int, rng: random.Random, processes: int | None, traces: Traces) -> dict[str, float]:
    coder, mathematician = CodeGrader(timeout_s=2.0, processes=processes), MathGrader()
    wrong = late = programs = answers = 0
    began, memory, files = time.monotonic(), 0.0, 0
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        batch = [program(rng, traces.places()) for _ in range(size * 4 // 5)]
        responses, tests, scores = zip(*batch, strict=True)
        results = coder(
            data_sources=["code"] * len(batch),
            solution_strs=responses,
            ground_truths=tests,
            extra_infos=[{}] * len(batch),
        )
        for response, result, score in zip(responses, results, scores, strict=True):
            if score == 1.0 and result["status"] == "timeout":
                late += 1
            elif result["score"] != score:
                wrong += 1
                print(f"{result} instead of {score}: {response[:500]!r}", flush=True)
        programs += len(batch)
        questions = [answer(rng) for _ in range(size - len(batch))]
        responses, keys, scores = zip(*questions, strict=True)
        marks = mathematician(
            data_sources=["math"] * len(questions),
            solution_strs=responses,
            ground_truths=keys,
            extra_infos=[{}] * len(keys),
        )
        for response, mark, score in zip(responses, marks, scores, strict=True):
            if mark != score:
                wrong += 1
                print(f"{mark} instead of {score}: {response[:200]!r}", flush=True)
        answers += len(questions)
        if start <= count // 10:
            memory, files = own_use()
        if start % (10 * BATCH) == 0:
            print(f"{start + size} of {count}, {time.monotonic() - began:.0f} s, {own_use()[0]:.0f} MiB", flush=True)
    seconds = time.monotonic() - began
    deadline = time.monotonic() + 10.0
    while traces.count_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    memory_end, files_end = own_use()
    return {
        "programs": programs,
        "answers": answers,
        "processes_left": traces.count_processes(),
        "files_left": traces.count_files(),
        "ports_open": traces.count_ports(),
        "connections": traces.count_connections(),
        "open_files_growth": files_end - files,
        "wrong_scores": wrong,
        "late": late,
        "rss_growth_mb": round(memory_end - memory, 1),
        "seconds": round(seconds, 1),
        "per_second": round((programs + answers) / seconds, 1),
    }


if __name__ == "__main__":
    main()
