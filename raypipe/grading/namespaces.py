"""PID namespaces: what runs in one can neither escape a kill nor name any process outside.

In: nothing but the kernel's permission, which root has on a plain machine and other users have where user namespaces
are open to them. Containers mostly refuse both. Whether it works is tried out, in a process that is thrown away.
"""

import ctypes
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 16384, 1 << 19

_libc = ctypes.CDLL(None, use_errno=True)
# Flags of the namespaces that this kernel permits; None: not tried yet. Processes forked from this one know them too.
_permitted: int | None = None


def permitted_namespaces() -> int:
    """The flags of `unshare` that give a PID namespace with its own /proc here, or 0; tried in a throw-away process."""
    global _permitted
    if _permitted is None:
        choices = (CLONE_NEWPID | CLONE_NEWNS, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUSER)
        _permitted = next(filter(_works, choices), 0)
    return _permitted


def _works(flags: int) -> bool:
    probe = os.fork()
    if probe == 0:
        try:
            enter(flags)
            inner = os.fork()
            if inner == 0:
                mount_proc()
                os._exit(0)
            os._exit(os.waitpid(inner, 0)[1] != 0)
        finally:
            os._exit(1)
    return os.waitpid(probe, 0)[1] == 0


def enter(flags: int) -> None:
    """Moves this process's mounts, and its next child, into new namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def mount_proc() -> None:
    """Gives the namespace that this process is in a /proc that shows its processes only."""
    if _libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /")
    if _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /proc")
