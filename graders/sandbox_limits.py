"""What a sandbox may use: `Limits`, and how sandboxes are kept apart from the machine: `Isolation`."""

import math
import platform
import re
from dataclasses import dataclass
from typing import Literal

# "uid", when started by root: a user id of its own for each sandbox, and no user namespace. "userns": a user namespace,
# for everyone else, where the kernel allows it. "none": not a sandbox, only resource limits.
Isolation = Literal["uid", "userns", "none"]


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Past `wall_s` it ends as `timeout`; past the others as `killed`, unless stated."""

    wall_s: float = 5.0  # seconds from the program's start; each process may use little more than that of CPU
    memory_mb: int = 1024  # MiB of memory over all processes, and of address space in each (there, allocation fails)
    processes: int = 64  # processes; at four times as many processes and threads, fork fails
    disk_mb: int = 64  # MiB of files in the working directory (past it, writing fails)
    output_mb: float = 8.0  # MiB of standard output, error and messages together

    def rlimits(self, isolation: Isolation) -> dict[str, int]:
        """The limits of each process, by their names in `resource`."""
        rlimits = {
            "AS": self.memory_mb * 2**20,
            "CPU": math.ceil(self.wall_s) + 1,
            "FSIZE": self.disk_mb * 2**20,
            "NOFILE": 256,
            "CORE": 0,
        }
        # NPROC counts per user id; never for root, and in a user namespace that namespace alone since Linux 5.14.
        # Before, and without a sandbox, it would count whatever else the calling user runs.
        release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
        if isolation == "uid" or (isolation == "userns" and release >= (5, 14)):
            rlimits["NPROC"] = 4 * self.processes
        return rlimits
