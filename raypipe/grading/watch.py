"""What processes hold, read from /proc. One that ends meanwhile is not counted, and none can refuse or delay it."""

import os
import resource
import time
from pathlib import Path

EXACT_LOOK_S = 0.02


def hold_more(pids: list[int], limit: int) -> bool:
    """Whether the processes hold more than `limit` bytes together."""
    resident = {pid: _resident(pid) for pid in pids}
    if sum(resident.values()) <= limit:
        return False
    # What they share counts several times there. The exact look is slow: the largest first, and not for long, since
    # a fork bomb must be seen to by the number of its processes.
    total, deadline = 0, time.monotonic() + EXACT_LOOK_S
    for pid in sorted(pids, key=resident.__getitem__, reverse=True):
        total += _proportional(pid)
        if total > limit or time.monotonic() > deadline:
            break
    return total > limit


def descendants(pid: int) -> list[int]:
    """Ids of all living processes below `pid`."""
    try:
        return _descendants_by_children(pid)
    except FileNotFoundError:
        return _descendants_by_parents(pid)


def _descendants_by_children(root: int) -> list[int]:
    """Costs in proportion to the tree. Raises FileNotFoundError where the kernel lists no children."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                below = list(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
                found += below
                todo += below
        except OSError:
            if pid == root:
                raise
    return found


def _descendants_by_parents(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
            parents[int(name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
        except (OSError, ValueError):
            continue
    found: set[int] = set()
    more = {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return list(found)


def _resident(pid: int) -> int:
    """Bytes of memory of a process, with those it shares."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Bytes of memory of a process, a shared one divided by those who share it. Exact, but slower to read."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except FileNotFoundError:
        return _resident(pid) if Path(f"/proc/{pid}").exists() else 0
    except OSError:
        pass
    return 0
