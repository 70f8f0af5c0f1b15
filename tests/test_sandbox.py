"""The sandbox itself, in each isolation that works on this machine."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graders import sandbox
from graders.process_watch import memory_mb, process_tree, unshared_memory_mb
from graders.sandbox import PYTHON, WORK, Isolation, Limits, Result, Sandbox, SandboxError, find_isolation
from graders.sandbox import run_in_sandbox as run


def works(isolation: Isolation) -> bool:
    try:
        return run([PYTHON, "-S", "-c", "print(1)"], isolation=isolation).stdout == b"1\n"
    except SandboxError:
        return False


CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
ISOLATIONS = [isolation for isolation in ("uid", "userns") if works(isolation)]


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return request.param


def python(code: str, isolation: Isolation, stdin: bytes = b"", **limits: float) -> Result:
    return run([PYTHON, "-I", "-c", code], stdin=stdin, limits=Limits(**limits), isolation=isolation)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


def processes_with(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_found_isolation_is_the_strongest_that_works():
    assert find_isolation() == ISOLATIONS[0]


def test_runs_a_command_with_input_and_files(isolation):
    code = "import sys; print(input(), open('a.txt').read(), sorted(__import__('os').listdir())); sys.exit(3)"
    result = run([PYTHON, "-I", "-c", code], stdin=b"hello", files={"a.txt": b"file"}, isolation=isolation)
    assert (result.status, result.returncode, result.reason) == ("exited", 3, "")
    assert result.stdout == b"hello file ['a.txt']\n"


def test_packages_may_lie_below_the_directory_that_is_writable_inside(isolation, monkeypatch):
    program = "import lying_in_tmp, os; print(lying_in_tmp.VALUE, os.access(lying_in_tmp.__file__, os.W_OK))"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        packages = Path(folder, "site-packages")
        packages.mkdir()
        (packages / "lying_in_tmp.py").write_text("VALUE = 7")
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(packages))
        with Sandbox(program=program, isolation=isolation, packages=True) as sandbox:
            assert sandbox.wait().stdout == b"7 False\n"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x"])
def test_a_file_may_not_leave_the_working_directory(name):
    with pytest.raises(ValueError, match="plain file name"):
        run([PYTHON], files={name: b""})


def test_a_command_that_is_not_there_says_so(isolation):
    result = run(["/usr/bin/no-such-program"], isolation=isolation)
    assert result.returncode == 127
    assert b"No such file" in result.stderr


def test_nothing_of_the_host_is_inside(isolation, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "canary-7731")
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    code = f"""
import os, json
seen = {{"environ": dict(os.environ), "cwd": os.getcwd(), "here": os.listdir(), "root": os.getuid() == 0}}
seen["top"] = sorted(os.listdir("/"))
seen["secret"] = os.path.exists({str(secret)!r})
seen["etc"] = os.listdir("/etc")
seen["ids"] = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
seen["canary"] = False
for pid in seen["ids"]:
    try:
        seen["canary"] |= b"canary-7731" in open(f"/proc/{{pid}}/environ", "rb").read()
    except OSError:
        pass
seen["writable"] = [path for path in ("/", "/dev", "/usr/lib", "/proc/sys", "/tmp") if os.access(path, os.W_OK)]
print(json.dumps(seen))
"""
    seen = json.loads(python(code, isolation).stdout)
    assert seen["environ"].keys() <= {"LC_CTYPE"}  # which Python sets itself
    assert seen["cwd"] == WORK and seen["here"] == []
    assert not seen["root"] and not seen["secret"] and not seen["canary"]
    assert set(seen["top"]) <= {"dev", "etc", "lib", "lib64", "proc", "tmp", "usr", Path(PYTHON).parts[1]}
    assert set(seen["etc"]) <= {"ld.so.cache"}
    assert len(seen["ids"]) == 3  # bubblewrap's, the watching one and this
    assert seen["writable"] == ["/tmp"]


def test_there_is_no_network(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"""
import socket
for address in [("127.0.0.1", {server.getsockname()[1]}), ("192.0.2.1", 80)]:
    try:
        socket.create_connection(address, timeout=1)
        print("open")
    except OSError:
        print("closed")
"""
        assert python(code, isolation).stdout == b"closed\nclosed\n"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "call",
    ["unshare(0x10000000)", "memfd_create(b'a', 0)", "shmget(0, 4096, 0o1600)", "ptrace(0, 0, 0, 0)",
     "mount(b'none', b'/tmp', b'tmpfs', 0, None)", f"syscall({CLONE}, 0x10000011, 0, 0, 0, 0)"],
)  # fmt: skip
def test_system_calls_that_no_limit_covers_are_denied(isolation, call):
    code = f"import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.{call}, ctypes.get_errno())"
    assert python(code, isolation).stdout == b"-1 1\n"  # EPERM


def test_time_limit(isolation):
    result = python("import time; print('begun', flush=True); time.sleep(60)", isolation, wall_s=0.5)
    assert (result.status, result.returncode, result.reason) == ("timeout", None, "wall_s")
    assert result.stdout == b"begun\n" and 0.5 <= result.seconds < 5


def test_cpu_limit_covers_every_process(isolation):
    code = "import os, resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
    assert python(code, isolation, wall_s=1.5).stdout == b"(3, 3)\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_limit(isolation, stream):
    result = python(f"import sys\nwhile True: sys.{stream}.write('x' * 4096)", isolation, output_mb=1)
    assert (result.status, result.reason) == ("killed", "output_mb")
    assert len(result.stdout) <= 2**20 and len(result.stderr) <= 4096


def test_one_allocation_past_the_memory_limit_fails(isolation):
    code = "try: bytearray(300 << 20)\nexcept MemoryError: print('no memory')"
    assert python(code, isolation, memory_mb=256).stdout == b"no memory\n"


def test_memory_is_limited_over_all_processes(isolation):
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(b"x") * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    result = python(code, isolation, memory_mb=200, wall_s=30)
    assert (result.status, result.reason) == ("killed", "memory_mb")


def test_shared_memory_counts_once(isolation):
    code = """
import os, time
block = bytearray(b"x") * (60 << 20)
children = [os.fork() or (time.sleep(0.5), os._exit(0)) for _ in range(8)]
for child in children:
    os.waitpid(child, 0)
print("done")
"""
    assert python(code, isolation, memory_mb=200, wall_s=30).stdout == b"done\n"


@pytest.mark.parametrize("code", ["import os\nwhile True: os.fork()", "import os, time\n"
                         "for _ in range(100): os.fork() or time.sleep(60)\ntime.sleep(60)"])  # fmt: skip
def test_fork_bombs_end(isolation, code):
    result = run([PYTHON, "-I", "-c", code], limits=Limits(processes=20, wall_s=20), isolation=isolation)
    assert result.status == "killed" or result.returncode != 0
    assert result.seconds < 15


def test_files_are_limited_in_size(isolation):
    code = """
for name in ("/tmp/a", "/dev/shm/b", "/tmp/c"):
    try:
        open(name, "wb").write(b"x" * (3 << 20))
        print("written")
    except OSError:
        print("full")
"""
    assert python(code, isolation, disk_mb=4).stdout == b"written\nwritten\nfull\n"


def test_input_is_not_needed_and_large_input_arrives(isolation):
    assert python("print(1)", isolation, stdin=b"x" * 2**22).stdout == b"1\n"
    assert python("print(len(open(0).read()))", isolation, stdin=b"x" * 2**22).stdout == b"4194304\n"


def test_what_was_printed_before_the_end_is_kept(isolation):
    code = "import os; os.write(1, b'x' * 60000); os._exit(0)"
    assert len(python(code, isolation).stdout) == 60000


def test_no_process_outlives_its_sandbox(isolation):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)  # marker-outlive
    os._exit(0)
print("done", flush=True)
"""
    result = python(code, isolation)
    assert result.stdout == b"done\n" and result.seconds < 30
    assert processes_with("marker-outlive") == []


def test_sandboxes_die_with_the_process_that_made_them(isolation):
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from graders.sandbox import *
program = "import os, sys, time; os.write(int(sys.argv[1]), b'ready' + bytes([10])); time.sleep(60)"
with Sandbox(program=program, isolation={isolation!r}) as sandbox:
    print(sandbox.receive().decode(), flush=True)
    sandbox.wait()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    inside = process_tree(child.pid)[1:]
    assert len(inside) == 4  # bubblewrap's two, the watching one and the program
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in inside))


def test_the_clock_stands_still_while_the_program_is_not_waited_for(isolation):
    code = "import os, sys\nfd = int(sys.argv[1])\nwhile os.read(fd, 9): os.write(fd, b'pong\\n')"
    with Sandbox(program=code, limits=Limits(wall_s=1), isolation=isolation) as box:
        box.send(b"ping")
        assert box.receive() == b"pong"
        time.sleep(1.5)
        box.send(b"ping")
        assert box.receive() == b"pong"
        assert box.receive() is None and box.result is not None and box.result.status == "timeout"


def test_nothing_is_left_open(isolation):
    def held() -> tuple[int, list[int]]:
        return len(os.listdir("/proc/self/fd")), process_tree(os.getpid())  # zombies too

    python("print(1)", isolation)
    before = held()
    for _ in range(5):
        python("print(1)", isolation, stdin=b"x" * 10**6)
        with Sandbox(program="while True: pass", isolation=isolation):
            pass
    assert held() == before


def test_a_bubblewrap_that_fails_is_reported_with_its_message(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="No permissions to create new namespace.*user.max_user_namespaces"):
        find_isolation()


def test_without_bubblewrap_it_refuses_and_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        run([PYTHON, "-c", "print(1)"])


def test_without_isolation_the_limits_hold():
    assert python("print(input())", "none", stdin=b"abc").stdout == b"abc\n"
    assert python("import time; time.sleep(60)", "none", wall_s=0.5).status == "timeout"
    assert python("bytearray(300 << 20)", "none", memory_mb=256).returncode == 1
    result = python("import os, time\nos.fork() or os.fork()\ntime.sleep(60)  # marker-none", "none", wall_s=0.5)
    assert result.status == "timeout" and wait_until(lambda: processes_with("marker-none") == [])


def test_the_watch_sees_processes_and_memory():
    code = "block = bytearray(b'x') * (50 << 20); import os, time; os.fork(); os.write(1, b'x'); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.read(2) == b"xx"
        pids = process_tree(child.pid)
        assert len(pids) == 2 and pids[0] == child.pid
        assert 50 < unshared_memory_mb(pids) < 90 < memory_mb(pids) < 180
    finally:
        for pid in process_tree(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert process_tree(child.pid) == [] and memory_mb([child.pid]) == unshared_memory_mb([child.pid]) == 0


def test_doc_example():
    import doctest

    assert doctest.testmod(sandbox).failed == 0
