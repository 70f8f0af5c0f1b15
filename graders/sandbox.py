"""Runs one untrusted program in bubblewrap: `run_in_sandbox(argv, stdin=..., limits=Limits()) -> Result`.

In: a command, standard input, files, limits. Out: how it ended, its exit code and its output. Inside there is no
network, no environment and no file of the host but the Python runtime and system libraries (bubblewrap.py); the whole
process tree is gone when the call returns.

The one design decision: one loop in the calling thread serves pipes and clock and watches memory and process count, and
whoever must be stopped is killed from outside. So n sandboxes need n threads and nothing else.
"""

import contextlib
import functools
import marshal
import os
import re
import secrets
import select
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from graders.bubblewrap import PYTHON, WORK, Isolation, SandboxError, find_bwrap, spawn
from graders.process_watch import memory_mb, process_tree, unshared_memory_mb
from graders.sandbox_limits import Limits
from graders.sandbox_pipes import Pipes

__all__ = ["PYTHON", "WORK", "Isolation", "Limits", "Result", "Sandbox", "SandboxError", "find_isolation",
           "run_in_sandbox"]  # fmt: skip

START_S = 30.0  # a sandbox that has not started by then is a fault of the machine
WATCH_S = 0.05  # between two looks at memory and process count


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    status: Literal["exited", "timeout", "killed"]
    returncode: int | None  # -N: died by signal N; None: did not end by itself
    stdout: bytes
    stderr: bytes  # the last 4 KiB
    reason: str  # the limit that was passed, or ""
    seconds: float  # wall time from the program's start


def run_in_sandbox(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    isolation: Isolation | None = None,
) -> Result:
    """Runs a command to its end.

    Args:
        argv: the command, by its absolute path inside (`PYTHON` is the interpreter; no shell and no `/usr/bin`).
        stdin: its standard input, closed at the end.
        files: plain file names and contents for its working directory `WORK`, which is empty otherwise.
        limits: what it may use.
        isolation: by default what `find_isolation()` found. "none" is no sandbox, only limits.

    Raises:
        SandboxError: the sandbox could not be started.
        RuntimeError: bubblewrap is missing or does not work here.

    >>> run_in_sandbox([PYTHON, "-I", "-c", "print(input()[::-1])"], stdin=b"abc").stdout
    b'cba\\n'
    """
    with Sandbox(argv=argv, stdin=stdin, files=files, limits=limits, isolation=isolation) as sandbox:
        return sandbox.wait()


def find_isolation() -> Isolation:
    """The strongest isolation that works here.

    Raises:
        RuntimeError: none does; says why and what to do.
    """
    return _probe(find_bwrap())


@functools.cache
def _probe(bwrap: str) -> Isolation:
    problems = []
    candidates: tuple[Isolation, ...] = ("uid", "userns") if os.geteuid() == 0 else ("userns",)
    for isolation in candidates:
        try:
            # An import, since the library's files need not be readable for another user id.
            with Sandbox(program="import json; print('ok')", isolation=isolation) as sandbox:
                result = sandbox.wait()
            if result.stdout == b"ok\n":
                return isolation
            problems.append(f"{isolation}: {result.stderr.decode(errors='replace').strip()}")
        except SandboxError as error:
            problems.append(f"{isolation}: {error}")
    raise RuntimeError(
        f"{bwrap} cannot make a sandbox here ({'; '.join(problems)}). Allow unprivileged user namespaces (sysctl "
        "user.max_user_namespaces, kernel.unprivileged_userns_clone, the container's seccomp or AppArmor profile), or "
        "start as root with CAP_SYS_ADMIN"
    )


@functools.lru_cache(maxsize=8)
def _compiled(program: str) -> bytes:
    return marshal.dumps(compile(program, "program", "exec", dont_inherit=True))


class Sandbox:
    """A running sandbox; a context manager. Leaving it kills whatever still runs inside.

    What runs is a command (`argv`) or Python source (`program`, up to about 50 kB), which saves starting a second
    interpreter. Python source may talk with the caller over the socket whose number is `sys.argv[1]`: the caller
    `send`s bytes and `receive`s lines. What comes back is the word of an untrusted program, just like its output. The
    program's wall clock stands still from a line received until the caller sends or waits again.

    `packages`: whether the caller's site-packages can be imported inside. Other arguments as in `run_in_sandbox`.
    Stay in the thread that made it: when that thread ends, so does the sandbox.
    """

    def __init__(
        self,
        *,
        argv: Sequence[str] = (),
        program: str = "",
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        isolation: Isolation | None = None,
        packages: bool = False,
    ):
        for name in files or ():
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ValueError(f"files: {name!r} is not a plain file name")
        isolation = isolation or find_isolation()
        spec = {
            "argv": list(argv),
            "program": _compiled(program),
            "path": [sysconfig.get_path("purelib")] if packages else [],
            "limits": limits.rlimits(isolation),
            "uid": secrets.randbelow(2**30) + 2**30 if isolation == "uid" else None,
        }
        self.result: Result | None = None
        self._limits = limits
        self._output_bytes = int(limits.output_mb * 2**20)
        self._ready = False
        self._begun = time.monotonic()
        self._deadline = self._begun + START_S
        self._next_watch = self._begun + WATCH_S
        self._waits_since: float | None = None  # when the program began to wait for us
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup:
            bwrap = directory = ""
            if isolation == "none":
                directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="unsafe-"))
            else:
                bwrap = find_bwrap()
            self._spawned = spawn(
                spec, isolation, bwrap=bwrap, disk_mb=limits.disk_mb, files=files or {}, directory=directory
            )
            self._cleanup = cleanup.pop_all()
        self._pipes = Pipes(self._spawned.fds, stdin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """Queues bytes for the program's socket; they leave while the caller waits for something."""
        self._resume_clock()
        self._pipes.send(data)

    def receive(self, meanwhile: "Sandbox | None" = None) -> bytes | None:
        """The next line from the program's socket, without its end; None when the sandbox ended without one.

        `meanwhile`: another sandbox, which is watched during the wait.
        """
        self._resume_clock()
        inbox = self._pipes.received["channel"]
        while (end := inbox.find(b"\n")) < 0:
            if self.result:
                return None
            self._step()
            if meanwhile:
                meanwhile._step(wait=False)
        self._waits_since = time.monotonic()
        line = bytes(inbox[:end])
        del inbox[: end + 1]
        return line

    def wait(self) -> Result:
        """Waits for the program to end, or ends it when it passes a limit."""
        self._resume_clock()
        while not self.result:
            self._step()
        return self.result

    def close(self) -> None:
        """Kills what still runs and frees everything; may be called twice."""
        self._kill()
        self._pipes.close()
        if self._spawned.root_pidfd is not None:
            os.close(self._spawned.root_pidfd)
            self._spawned.root_pidfd = None
        self._cleanup.close()

    def _resume_clock(self) -> None:
        if self._waits_since is not None:
            self._deadline += time.monotonic() - self._waits_since
            self._waits_since = None

    def _step(self, wait: bool = True) -> None:
        """Serves the pipes that are ready, and ends the sandbox if it must end."""
        if self.result:
            return
        wait_s = min(self._deadline, self._next_watch) - time.monotonic() if wait else 0.0
        self._pipes.serve(wait_s)
        self._judge(time.monotonic())

    def _judge(self, now: float) -> None:
        control = bytes(self._pipes.received["control"]).split(b"\n")
        if not self._ready and control[0] == b"ready":
            self._ready, self._begun, self._deadline = True, now, now + self._limits.wall_s
        if not self._ready and ("control" not in self._pipes.fds or now > self._deadline):
            self._kill()
            message = bytes(self._pipes.received["stderr"]).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {message or f'nothing heard in {START_S:.0f} s'}")
        if len(control) > 2:
            self._finish("exited", returncode=int(control[1]) if re.fullmatch(rb"-?\d{1,3}", control[1]) else -9)
        elif "control" not in self._pipes.fds:  # the program killed what watched over it, and so itself
            self._finish("exited", returncode=-signal.SIGKILL)
        elif self._pipes.produced > self._output_bytes:
            self._finish("killed", reason="output_mb")
        elif now > self._deadline and self._waits_since is None:
            self._finish("timeout", reason="wall_s")
        elif now > self._next_watch:
            self._next_watch = now + WATCH_S
            pids = process_tree(self._spawned.root)
            outer = 1 if self._spawned.root_pidfd is None else 2  # bubblewrap's own process and sandbox_init's
            if len(pids) - outer > self._limits.processes:
                self._finish("killed", reason="processes")
            elif memory_mb(pids) > self._limits.memory_mb and unshared_memory_mb(pids) > self._limits.memory_mb:
                self._finish("killed", reason="memory_mb")

    def _finish(
        self,
        status: Literal["exited", "timeout", "killed"],
        returncode: int | None = None,
        reason: str = "",
    ) -> None:
        seconds = time.monotonic() - self._begun
        self._kill()
        self._pipes.drain()
        if status == "exited" and self._pipes.produced > self._output_bytes:
            status, returncode, reason = "killed", None, "output_mb"
        if returncode == -signal.SIGXCPU:
            status, returncode, reason = "timeout", None, "cpu"
        stdout = bytes(self._pipes.received["stdout"][: self._output_bytes])
        self.result = Result(status, returncode, stdout, bytes(self._pipes.received["stderr"]), reason, seconds)

    def _kill(self) -> None:
        """Ends all processes inside and waits until they are gone."""
        spawned = self._spawned
        if spawned.process.returncode is not None:
            return
        if spawned.root_pidfd is None:
            for pid in process_tree(spawned.root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(spawned.root, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(spawned.root_pidfd, signal.SIGKILL)
            ended = select.poll()
            ended.register(spawned.root_pidfd, select.POLLIN)
            ended.poll(START_S * 1000)
        try:  # bubblewrap's outer process reaps the inner one and leaves
            spawned.process.wait(START_S)
        except subprocess.TimeoutExpired:
            spawned.process.kill()
            spawned.process.wait()
