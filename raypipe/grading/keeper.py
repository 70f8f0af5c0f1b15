"""The process above a grader process: isolates it, bounds what it holds, and kills it with all its descendants.

In: a control socket to the parent and the work to do. Out: one report on that socket that says how the work ended,
after which nothing of it is left. The keeper lives as long as the parent holds the other end of the socket: its end is
the order to kill, so that nothing outlives the parent's own death by `kill -9`.

    parent ── keeper ── init ── grader process ── whatever it starts      with a PID namespace
    parent ── keeper ── grader process ── whatever it starts              without

Where the kernel permits it, the work runs in a PID namespace of its own. Then one kill of `init` ends every process in
it, whatever session it moved to, whatever signals it blocks and however fast it forks, and no process in it can even
name the keeper or anything else of the machine (a grader's `os.kill(-1, 9)` ends its own namespace only). Where it is
not permitted (most containers without privileges), the keeper is the parent of all orphans below it (a "subreaper"), so
that it can find every descendant, and sweeps until none is left; a grader that kills the keeper itself gets away there.

Output of the work is drained into a tail of a few KiB, so that it costs nothing, cannot block, and explains a crash.
Files that the work left in its temporary folder are removed.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from raypipe.grading.namespaces import CLONE_NEWUSER, enter, mount_proc, permitted_namespaces
from raypipe.grading.watch import descendants, hold_more

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Linux release since which /proc/sys/kernel/pid_max is the namespace's (before, it is the whole machine's), and the
# numbers below which no process is numbered once they have run through.
PID_MAX_BY_NAMESPACE = (6, 14)
RESERVED_PIDS = 300
FOLDER = "raypipe-grader-"
STALE_S = 60.0
POLL_S = 0.1
CHUNK = 1 << 16
TAIL_BYTES = 4096
SWEEP_LIMIT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What the work and all its descendants may hold together, as seen every `POLL_S`.

    A byte on the control socket multiplies both: for work that starts so many grader processes itself. In a namespace
    the kernel bounds the processes too, where it can (`hard_processes`), since a fork bomb is faster than a look.
    """

    memory_mb: int
    processes: int
    hard_processes: int
    namespaces: bool


def keep(control: socket.socket, work: Callable[[], None], limits: Limits) -> NoReturn:
    """Runs `work` in a process below this one until it ends or must be killed, reports on `control`, and exits."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = _own_folder()
    output, output_end = os.pipe()
    flags = permitted_namespaces() if limits.namespaces else 0
    if flags:
        enter(flags)
    child = os.fork()
    if child == 0:
        try:
            control.close()
            _become_work(output_end, folder)
            if flags:
                _become_init(flags, limits.hard_processes)
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(70)
    os.close(output_end)
    reason, tail = _watch(control, child, output, limits, bool(flags))
    reason += kill_all(child, namespace=bool(flags))
    shutil.rmtree(folder, ignore_errors=True)
    control.settimeout(1.0)
    try:
        control.sendall(json.dumps({"reason": reason, "tail": tail.decode(errors="replace")}).encode())
    except OSError:
        pass  # the parent is gone
    os._exit(0)


def _own_folder() -> str:
    """A new temporary folder for the work, locked as long as any process of it lives."""
    folder = tempfile.mkdtemp(prefix=FOLDER)
    lock_folder(folder)
    return folder


def lock_folder(folder: str | Path) -> int:
    """Says that the folder is in use, until this process and those forked from it have ended."""
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove_stale_folders() -> None:
    """Removes what keepers left that were killed themselves, with all their work, before they could."""
    for folder in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock).st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)


def _become_work(output_end: int, folder: str) -> None:
    """Dies with its parent, writes no core, goes first when memory runs out, and owns a temporary folder.

    In a session of its own: the kernel shares CPU time by sessions, so the keeper gets its part beside a fork bomb.
    """
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(output_end, 1)
    os.dup2(output_end, 2)
    os.close(output_end)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _become_init(flags: int, processes: int) -> None:
    """Makes this process the first of its namespace, which reaps orphans, and returns in a child of it."""
    mount_proc()
    if flags & CLONE_NEWUSER:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))  # counts the processes of this namespace only
    if tuple(map(int, os.uname().release.split(".")[:2])) >= PID_MAX_BY_NAMESPACE:
        Path("/proc/sys/kernel/pid_max").write_text(str(RESERVED_PIDS + processes))
    child = os.fork()
    if child == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    os.closerange(0, 1 << 16)  # so that sockets and pipes end when the grader process does
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _watch(control: socket.socket, child: int, output: int, limits: Limits, namespace: bool) -> tuple[str, bytes]:
    """Waits until the work ends, must end, or breaks a limit; returns why and the end of its output."""
    tail = b""
    ended = os.pidfd_open(child)
    poller = select.poll()
    for fd in (control.fileno(), output, ended):
        poller.register(fd, select.POLLIN)
    os.set_blocking(output, False)
    next_check = time.monotonic() + POLL_S
    reason = ""
    while not reason:
        ready = {fd for fd, _ in poller.poll(max(0.0, next_check - time.monotonic()) * 1000)}
        if output in ready:
            part = os.read(output, CHUNK)
            tail = (tail + part)[-TAIL_BYTES:]
            if not part:
                poller.unregister(output)
        if control.fileno() in ready:
            if times := control.recv(1):
                limits = replace(limits, memory_mb=limits.memory_mb * times[0], processes=limits.processes * times[0])
            else:
                reason = "was stopped"
        elif ended in ready:
            reason = _describe_exit(child)
            try:
                tail = (tail + os.read(output, CHUNK))[-TAIL_BYTES:]
            except BlockingIOError:
                pass
        elif time.monotonic() >= next_check:
            reason = _over_limit(limits, namespace)
            next_check = time.monotonic() + POLL_S
    os.close(ended)
    return reason, tail


def _describe_exit(child: int) -> str:
    result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert result is not None
    code = result.si_status
    if result.si_code == os.CLD_EXITED and code <= 128:
        return f"exited with code {code}"
    number = code - 128 if result.si_code == os.CLD_EXITED else code  # init tells a signal as a shell does
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exited with code {code}"


def _over_limit(limits: Limits, namespace: bool) -> str:
    pids = processes_of_work(namespace)
    if len(pids) > limits.processes:
        return f"was stopped: it had more than {limits.processes} processes"
    if hold_more(pids, limits.memory_mb << 20):
        return f"was stopped: it held more than {limits.memory_mb} MiB of memory"
    return ""


def processes_of_work(namespace: bool) -> list[int]:
    """All processes below this one. With a namespace, /proc is that of the work, in which this process is not, from the
    moment that the work's first process has mounted it; until then it shows everything on the machine."""
    if namespace and not os.path.exists("/proc/self"):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return descendants(os.getpid())


def kill_all(child: int, namespace: bool) -> str:
    """Kills the work with all its descendants and waits until none is left; returns a note if some would not die."""
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while True:
        for pid in [child] if namespace else descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # gone meanwhile
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return ""
        if time.monotonic() > deadline:
            return "; some of its processes cannot be killed"
        time.sleep(0.002)
