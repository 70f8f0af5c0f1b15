"""The first program inside a sandbox: starts the untrusted one under its limits and reports how it ended.

Sent as source text to `python -c`, followed by a call of `start`; it imports nothing that is slow to start. In: the
spec (`sandbox.py`). Out, on the pipe `control_fd`: a line `ready` just before the untrusted program starts (the wall
clock starts there, so a slow start under load costs the program nothing), then a line with its exit code (-N for
signal N).

It then waits to be killed. Were it to exit, bubblewrap's outer process would leave before its inner one, which would
stay as a zombie for ever in containers whose first process does not reap.
"""

from __future__ import annotations

import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False  # `typing` takes longer to import than Python to start
if TYPE_CHECKING:
    from typing import Any


def restrict(limits: dict[str, int], uid: int | None) -> None:
    """Sets hard limits ({"AS": bytes, ...}, names as in `resource`) and gives up root for `uid`: for good, both."""
    for name, value in limits.items():
        number = getattr(resource, "RLIMIT_" + name)
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(number, (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def start(spec: dict[str, Any]) -> None:
    """Forks. The parent never returns; the child becomes `spec["argv"]` or, if that is empty, runs `spec["program"]`,
    marshalled Python code, which finds the number of its socket in `sys.argv[1]`."""
    os.write(spec["control_fd"], b"ready\n")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os.write(spec["control_fd"], b"%d\n" % os.waitstatus_to_exitcode(status))
        while True:
            time.sleep(3600)
    os.close(spec["control_fd"])
    os.environ.clear()
    sys.path.extend(spec["path"])
    restrict(spec["limits"], spec["uid"])
    if spec["argv"]:
        try:
            os.execve(spec["argv"][0], spec["argv"], {})
        except OSError as error:
            os.write(2, f"{spec['argv'][0]}: {error}\n".encode())
            os._exit(127)
    sys.argv = ["program", str(spec["channel_fd"])]
    exec(marshal.loads(spec["program"]), {"__name__": "__program__"})
