"""Starts bubblewrap: decides what exists inside a sandbox, and connects the pipes to it.

Inside there is the interpreter with its standard library and the system's shared libraries (read-only, no `/usr/bin`),
`/proc` and a minimal `/dev` of the sandbox's own, and an empty writable directory in memory. Everything else of the
host is absent: no network, no home, no site-packages (unless asked for), no environment.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graders.sandbox_limits import Isolation
from graders.seccomp import syscall_filter

PYTHON = os.path.realpath(sys.executable)  # the interpreter, at the same path inside
PREFIX = os.path.realpath(sys.base_prefix)
INSTALLED = f"{PREFIX}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
WORK = "/tmp"  # the writable directory inside; programs start there
INIT = Path(__file__).with_name("sandbox_init.py").read_text()
STANDARD = ("stdin", "stdout", "stderr")


class SandboxError(RuntimeError):
    """The sandbox could not be started, or something outside destroyed it: nothing is known about the program."""


@dataclass
class Spawned:
    """A started sandbox."""

    process: subprocess.Popen[bytes]  # to be reaped when the sandbox is dead
    root: int  # process id of the first process inside: all others descend from it
    root_pidfd: int | None  # the same; the kernel ends all others with it. None without isolation
    fds: dict[str, int]  # our ends: "stdin", "stdout", "stderr", "control", "channel"


def find_bwrap() -> str:
    """Path of bubblewrap; raises RuntimeError with how to install it."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RuntimeError(
            "bubblewrap (the program `bwrap`) is not installed, and untrusted code does not run without it. Install "
            "it: `apt-get install bubblewrap`, `dnf install bubblewrap` or `conda install bubblewrap`"
        )
    return bwrap


def spawn(
    spec: Mapping[str, Any],
    isolation: Isolation,
    *,
    bwrap: str = "",
    disk_mb: int,
    files: Mapping[str, bytes],
    directory: str = "",
) -> Spawned:
    """Starts a sandbox.

    Args:
        spec: what `sandbox_init.py` shall do, less the two descriptors.
        isolation: how.
        bwrap: path of bubblewrap.
        disk_mb: MiB that files in the working directory may take (and again in `/dev/shm`).
        files: the files of the working directory.
        directory: the working directory, on the host, where isolation is "none".

    Raises:
        SandboxError: it did not start; with bubblewrap's own message.
    """
    ours: dict[str, int] = {}
    inside: dict[str, int] = {}
    try:
        for name in (*STANDARD, "control", "info"):
            reading, writing = os.pipe()
            ours[name], inside[name] = (writing, reading) if name == "stdin" else (reading, writing)
        ours["channel"], inside["channel"] = (end.detach() for end in socket.socketpair())
        full_spec = {**spec, "control_fd": inside["control"], "channel_fd": inside["channel"]}
        command = [PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", f"{INIT}\nstart({full_spec!r})\n"]
        if isolation == "none":
            for name, data in files.items():
                Path(directory, name).write_bytes(data)
        else:
            if syscalls := syscall_filter():
                inside["filter"] = _memory_file(syscalls)
            for name, data in files.items():
                inside[f"file:{name}"] = _memory_file(data)
            command = _bwrap_argv(bwrap, isolation, disk_mb, spec["path"], inside) + command
        process = subprocess.Popen(
            command,
            stdin=inside["stdin"],
            stdout=inside["stdout"],
            stderr=inside["stderr"],
            pass_fds=[fd for name, fd in inside.items() if name not in STANDARD],
            cwd=directory or "/",
            env={},  # bubblewrap's own environment can be read inside (/proc/1/environ), whatever it hands down
            start_new_session=True,
        )
    except BaseException as error:
        for fd in ours.values():
            os.close(fd)
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        raise
    finally:
        for fd in inside.values():
            os.close(fd)
    info = ours.pop("info")
    if isolation == "none":
        os.close(info)
        return Spawned(process, process.pid, None, ours)
    try:
        with open(info, "rb") as stream:
            root = json.loads(stream.read())["child-pid"]
        return Spawned(process, root, os.pidfd_open(root), ours)
    except (ValueError, ProcessLookupError):
        process.wait()
        with open(ours.pop("stderr"), "rb") as stream:
            message = stream.read(4096).decode(errors="replace").strip()
        for fd in ours.values():
            os.close(fd)
        raise SandboxError(f"bubblewrap failed: {message}") from None


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as stream:
        stream.write(data)
        stream.seek(0)
    return fd


def _bwrap_argv(
    bwrap: str, isolation: Isolation, disk_mb: int, packages: Sequence[str], fds: Mapping[str, int]
) -> list[str]:
    """The command up to the program. `fds`: "info", "filter", and "file:" with a name, each to be read or written."""
    argv = [bwrap, "--die-with-parent", "--new-session", "--info-fd", str(fds["info"])]
    if "filter" in fds:
        argv += ["--seccomp", str(fds["filter"])]
    argv += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--hostname", "sandbox"]
    if isolation == "userns":
        argv += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    else:  # the two that sandbox_init needs to give up root
        argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    # Before the runtime, which may itself lie below /tmp: a later mount would cover it.
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for path in (WORK, "/dev/shm"):
        argv += ["--perms", "1777", "--size", str(disk_mb * 2**20), "--tmpfs", path]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    runtime = [*system, f"{PREFIX}/lib", f"{PREFIX}/lib64", PYTHON, *packages]
    runtime = [path for path in dict.fromkeys(runtime) if os.path.exists(path)]
    # Bubblewrap makes the directories above a mount for its own user alone.
    for directory in dict.fromkeys(str(parent) for path in runtime for parent in reversed(Path(path).parents)):
        argv += ["--perms", "0755", "--dir", directory]
    for path in runtime:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        else:
            argv += ["--ro-bind", path, path]
        if INSTALLED.startswith(path + "/") and os.path.isdir(INSTALLED):
            argv += ["--tmpfs", INSTALLED, "--remount-ro", INSTALLED]
    for name, fd in fds.items():
        if name.startswith("file:"):
            argv += ["--perms", "0644", "--file", str(fd), f"{WORK}/{name.removeprefix('file:')}"]
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
