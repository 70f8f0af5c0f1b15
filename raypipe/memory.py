"""What a run's processes hold in memory, by kind, and what lies in the object store.

In: the Ray session. Out: `memory/<kind>_gib` and `memory/<kind>_processes` for each iteration's metrics line. A
process's memory is what is resident and not shared (Ray's object store and libraries would count in every process that
maps them), so that kinds add up. A probe on each node reads the tree of processes below its raylet, which is its own
parent: engines and graders start children that no actor could report, and a process that hangs is read like any other.
On a cluster that others use, their actors are in the tree too.
"""

import contextlib
import os
import re
from typing import Any

import grpc
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GIB = 2**30
# Class of a Ray worker's actor, as in its title, -> the kind it and its children count as.
ACTORS = {
    "VLLMEngine": ("engine", "engine_core"),
    "ScriptedEngine": ("engine", "engine"),
    "Scorer": ("scorer", "scorer"),
    "RayTrainWorker": ("learner", "learner"),
    "GraderHost": ("grader_host", "grader"),
    "GradeDispatcher": ("plans", "plans"),
    "PlanServer": ("plans", "plans"),
    "SplitCoordinator": ("stages", "stages"),  # these two end with their plan
    "MapWorker": ("stages", "stages"),
    "IDLE": ("idle", "idle"),  # workers that Ray keeps ready, some for a moment
}
# Ray's own: raylets, their agents, the controller of Ray Train, GCS, dashboard.
OTHERS = ("ray", "ray")
# Seconds that an iteration's metrics wait for the probes.
PATIENCE_S = 5.0


class MemoryProbe:
    """An actor: reads the processes of its node."""

    def read(self) -> dict[str, list[int]]:
        """Of this node's raylet and all below it."""
        return tree_bytes(psutil.Process(os.getppid()))


def tree_bytes(root: psutil.Process) -> dict[str, list[int]]:
    """By kind what each process holds, in bytes, of a process and all its descendants; those that end meanwhile are
    left out."""
    found: dict[str, list[int]] = {}
    kinds = {root.pid: OTHERS}
    for process in [root, *root.children(recursive=True)]:  # parents before their children
        with contextlib.suppress(psutil.Error):
            if process.pid not in kinds:
                above = kinds.get(process.ppid(), OTHERS)
                kinds[process.pid] = kind_of(process.cmdline()) or (above[1], above[1])
            found.setdefault(kinds[process.pid][0], []).append(own_bytes(process))
    return found


def kind_of(command: list[str]) -> tuple[str, str] | None:
    """The kinds of a Ray worker and of its children; None for another process. Titles are such as
    ray::run/engine-0:VLLMEngine.__init__, ray::MapWorker(MapBatches(Grade)) and ray::IDLE."""
    title = command[0] if command else ""
    if not title.startswith("ray::"):
        return None
    words = re.findall(r"\w+", title.partition("(")[0])
    return next((ACTORS[word] for word in words if word in ACTORS), OTHERS)


def own_bytes(process: psutil.Process) -> int:
    """Resident bytes that are not shared with other processes or files."""
    memory = process.memory_info()
    return memory.rss - getattr(memory, "shared", 0)  # Linux alone tells


class MemoryWatch:
    """Reads all nodes of the Ray session that this process is connected to."""

    def __init__(self) -> None:
        self.probes: dict[str, Any] = {}
        self._start_probes()

    def _start_probes(self) -> None:
        """One for each node that has none yet."""
        for node in ray.nodes():
            name = node["NodeID"]
            if node["Alive"] and name not in self.probes:
                place = NodeAffinitySchedulingStrategy(name, soft=False)
                self.probes[name] = ray.remote(MemoryProbe).options(num_cpus=0, scheduling_strategy=place).remote()

    def read(self) -> dict[str, float]:
        """The metrics; nodes that do not answer in time are left out."""
        self._start_probes()
        driver = psutil.Process()
        found = {"driver": [own_bytes(driver)]}
        for child in driver.children():  # those of a Ray that this process has started, but for the raylet's tree
            with contextlib.suppress(psutil.Error):
                if child.name() != "raylet":
                    add(found, {"ray": [own_bytes(child)]})
        readings = [probe.read.remote() for probe in self.probes.values()]
        done, _ = ray.wait(readings, num_returns=len(readings), timeout=PATIENCE_S)
        for reading in done:
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone
                add(found, ray.get(reading))
        metrics = {f"memory/{kind}_gib": sum(held) / GIB for kind, held in found.items()}
        metrics |= {f"memory/{kind}_processes": float(len(held)) for kind, held in found.items()}
        with contextlib.suppress(grpc.RpcError):  # the raylet that was asked is gone
            metrics["memory/object_store_gib"] = object_store_bytes() / GIB
        return metrics


def add(total: dict[str, list[int]], part: dict[str, list[int]]) -> None:
    for kind, held in part.items():
        total.setdefault(kind, []).extend(held)


def object_store_bytes() -> int:
    """Bytes of the objects in Ray's object stores, of all nodes together. Ray has no public function for it: this is
    what `ray memory --stats-only` shows."""
    from ray._private.internal_api import get_memory_info_reply
    from ray._private.state import state

    reply: Any = get_memory_info_reply(state, timeout_seconds=PATIENCE_S)
    return int(reply.store_stats.object_store_bytes_used)
