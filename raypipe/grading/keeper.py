"""The process above a grader process: isolates it, bounds what it holds, and kills it with all its descendants.

In: a control socket to the parent and the work to do. Out: one line of JSON on that socket that says how the work
ended, after which nothing of it is left. The keeper lives as long as the parent holds the other end of the socket: its
end (a kill, or the parent's own death by `kill -9`) is the order to kill.

    parent ── keeper ── init ── grader process ── whatever it starts      with a PID namespace
    parent ── keeper ── grader process ── whatever it starts              without

Where the kernel permits it, the work runs in a PID namespace of its own. Then one kill of `init` ends every process in
it, whatever session it moved to, whatever signals it blocks and however fast it forks, and no process in it can even
name the keeper or anything else of the machine (a grader's `os.kill(-1, 9)` ends its own namespace only). Where it is
not permitted (most unprivileged containers), the keeper is made the parent of all orphans below it (a "subreaper"), so
every descendant can be found through /proc, and sweeps until none is left.

Output of the work is drained into a tail of a few KiB, so that it costs nothing, cannot block, and explains a crash.
Standard library only.
"""

import ctypes
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
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 16384, 1 << 19
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_PROCESSES = 1000
POLL_S = 0.1
TAIL_BYTES = 4096
SWEEP_LIMIT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
# Flags of the namespaces that this kernel permits; None: not tried yet. Known to processes forked from this one.
_permitted: int | None = None


def keep(control: socket.socket, work: Callable[[], None], memory_mb: int, shares: int, namespaces: bool) -> NoReturn:
    """Runs `work` in a process below this one until it ends or must be killed, reports, and exits.

    Args:
        control: socket to the parent; its end is the order to kill.
        work: what the grader process does.
        memory_mb: memory that all processes of the work may hold, times `shares`, in MiB.
        shares: how many grader processes the work may hold itself (1, or more where it starts others from itself).
        namespaces: whether to try a PID namespace.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = tempfile.mkdtemp(prefix="raypipe-grader-")
    output, output_end = os.pipe()
    flags = permitted_namespaces() if namespaces else 0
    if flags:
        _enter(flags)
    child = os.fork()
    if child == 0:
        try:
            control.close()
            _become_work(output_end, folder)
            if flags:
                _become_init()
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(70)
    os.close(output_end)
    reason, tail = _watch(control, child, output, memory_mb * shares << 20, MAX_PROCESSES * shares, bool(flags))
    left = kill_all(child, namespace=bool(flags))
    shutil.rmtree(folder, ignore_errors=True)
    report = {"reason": reason + left, "tail": tail.decode(errors="replace")}
    control.settimeout(1.0)
    try:
        control.sendall(json.dumps(report).encode())
    except OSError:
        pass
    os._exit(0)


def permitted_namespaces() -> int:
    """The flags of `unshare` that give a PID namespace with its own /proc here, or 0; tried in a process thrown away."""
    global _permitted
    if _permitted is None:
        for flags in (CLONE_NEWPID | CLONE_NEWNS, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUSER):
            probe = os.fork()
            if probe == 0:
                try:
                    _enter(flags)
                    inner = os.fork()
                    if inner == 0:
                        _mount_proc()
                        os._exit(0)
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
                except BaseException:
                    os._exit(1)
            if os.waitpid(probe, 0)[1] == 0:
                _permitted = flags
                break
        else:
            _permitted = 0
    return _permitted


def _enter(flags: int) -> None:
    """Moves this process's mounts, and its next child, into new namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount_proc() -> None:
    if _libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /")
    if _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /proc")


def _become_work(output_end: int, folder: str) -> None:
    """What the work may not undo: dies with its parent, writes no core, is the first that an out-of-memory kill takes."""
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


def _become_init() -> None:
    """Makes this process the first of its namespace, which reaps orphans, and returns in a child of it."""
    _mount_proc()
    child = os.fork()
    if child == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    os.closerange(0, 1 << 16)  # so that the ends of sockets and pipes are seen when the grader process is gone
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _watch(
    control: socket.socket, child: int, output: int, max_bytes: int, max_processes: int, namespace: bool
) -> tuple[str, bytes]:
    """Waits until the work ends, must end, or breaks a limit; returns why and the end of its output."""
    tail = b""
    ended = os.pidfd_open(child)
    poller = select.poll()
    for fd in (control.fileno(), output, ended):
        poller.register(fd, select.POLLIN | select.POLLHUP)
    next_check = time.monotonic() + POLL_S
    reason = ""
    while not reason:
        ready = {fd for fd, _ in poller.poll(max(0.0, next_check - time.monotonic()) * 1000)}
        if output in ready:
            part = os.read(output, 1 << 16)
            tail = (tail + part)[-TAIL_BYTES:]
            if not part:
                poller.unregister(output)
        elif ended in ready:
            reason = _describe_exit(child)
        if control.fileno() in ready:
            reason = "killed"
        if time.monotonic() >= next_check:
            next_check = time.monotonic() + POLL_S
            reason = reason or _over_limit(max_bytes, max_processes, namespace)
    os.close(ended)
    return reason, tail


def _describe_exit(child: int) -> str:
    result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert result is not None
    code = result.si_status
    if result.si_code == os.CLD_EXITED and code <= 128:
        return f"exited with code {code}"
    number = code - 128 if result.si_code == os.CLD_EXITED else code
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exited with code {code}"


def _over_limit(max_bytes: int, max_processes: int, namespace: bool) -> str:
    pids = _all_below(namespace)
    if len(pids) > max_processes:
        return f"killed: more than {max_processes} processes"
    if sum(map(_resident, pids)) > max_bytes and sum(map(_proportional, pids)) > max_bytes:
        return f"killed: more than {max_bytes >> 20} MiB of memory"
    return ""


def _all_below(namespace: bool) -> list[int]:
    """Ids of all processes of the work, as /proc of this process names them."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if namespace:
        return pids
    parents: dict[int, int] = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            parents[pid] = int(stat[stat.rindex(")") + 2 :].split()[1])
        except (OSError, ValueError):
            continue
    below: set[int] = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return sorted(below - {os.getpid()})
        below |= more


def _resident(pid: int) -> int:
    """Bytes of memory of a process, those it shares with others included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Bytes of memory of a process, each divided by the number of processes that share it. Exact, but slower to read."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def kill_all(child: int, namespace: bool) -> str:
    """Kills the work with all its descendants and waits until none is left; returns a note if some could not be killed."""
    deadline = time.monotonic() + SWEEP_LIMIT_S
    if namespace:
        os.kill(child, signal.SIGKILL)
    while True:
        if not namespace:
            for pid in _all_below(namespace=False):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return ""
        time.sleep(0.0005)
        if time.monotonic() > deadline:
            return "; some of its processes cannot be killed"
