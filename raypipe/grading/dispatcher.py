"""The run's one grading queue: a resident Ray actor between the Grade stages of all plans and the hosts of all nodes.

In: rows that are generated. Out: their GRADE_COLUMNS. One queue for the whole run, so that batches form across blocks,
groups and plans, work goes to whichever process of whichever node is free, and the rate of an async grader is the run's.

Ray Data scales the Grade stage, not this: every stage actor that attaches asks for one more host, up to the most that
`grade.workers` allows, and hosts stay for the run.

A row is known by its `sample_id`. A stage that died and asks again joins the call in progress or gets the result that
was kept; `forget(iteration)` lets go of them.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from raypipe.config import GradeConfig
from raypipe.grading.host import GraderHost
from raypipe.grading.processes import Sample
from raypipe.grading.queue import GradeQueue
from raypipe.grading.results import Reply

# Calls that may wait in an actor: every sample of every plan.
MAX_CONCURRENCY = 100_000
HOST_RESTART_LIMIT_S = 120.0


def start_dispatcher(grade: GradeConfig, hosts: tuple[int, int], run_name: str, cpus_per_host: float) -> ActorHandle:
    """Starts the actor `{run_name}/grade-dispatcher`; `start()` of it builds the graders and raises what is wrong.

    Args:
        grade: the configuration's section.
        hosts: (fewest, most) grader hosts (`config.grader_actors`).
        run_name: prefix of the actors' names.
        cpus_per_host: CPUs that each host reserves.
    """
    return (
        ray.remote(GradeDispatcher)
        .options(name=f"{run_name}/grade-dispatcher", num_cpus=0, max_concurrency=MAX_CONCURRENCY)
        .remote(grade, hosts, run_name, cpus_per_host)
    )


class RemoteSlot:
    """One process of a host, as the queue sees it; without an index, the process that runs async graders."""

    def __init__(self, host: ActorHandle, index: int | None, name: str):
        self.host, self.index, self.name = host, index, name

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        try:
            if self.index is None:
                return await self.host.call_in_loop.remote(grader, samples, limit_s)
            return await self.host.call.remote(self.index, grader, samples, limit_s)
        except ray.exceptions.RayError as error:
            return Reply("lost", error=f"{self.name} is gone: {str(error)[:500]}", ended=True)

    async def ready(self) -> None:
        """Returns once the host is back with its graders built; Ray starts it again meanwhile."""
        async with asyncio.timeout(HOST_RESTART_LIMIT_S):
            while True:
                try:
                    await self.host.ready.remote(self.index)
                    return
                except ray.exceptions.RayActorError:
                    await asyncio.sleep(0.2)


class GradeDispatcher:
    def __init__(self, grade: GradeConfig, hosts: tuple[int, int], run_name: str, cpus_per_host: float):
        self.grade_config, self.run_name, self.cpus_per_host = grade, run_name, cpus_per_host
        self.fewest, self.most = hosts
        self.hosts: list[ActorHandle] = []
        self.attached: dict[str, set[str]] = {}
        self.starting: asyncio.Task[None] | None = None
        self.queue: GradeQueue | None = None
        self.results: dict[int, dict[str, asyncio.Task[dict[str, Any]]]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Starts the first hosts. Raises GraderStartError (a ValueError) when a grader cannot be built."""
        if self.starting is None:
            self.starting = asyncio.create_task(self._start())
        await asyncio.shield(self.starting)

    async def _start(self) -> None:
        grade = self.grade_config
        first = self._new_host()
        info = await first.start.remote()
        self.queue = GradeQueue(
            grade.graders, info["is_async"], grade.async_concurrency, grade.async_rate, grade.retries
        )
        self._add(first, 0)
        await asyncio.gather(*(self._add_host() for _ in range(self.fewest - 1)))

    def _new_host(self) -> ActorHandle:
        grade = self.grade_config
        host = (
            ray.remote(GraderHost)
            .options(
                name=f"{self.run_name}/grader-host-{len(self.hosts)}",
                num_cpus=self.cpus_per_host,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=MAX_CONCURRENCY,
                scheduling_strategy="SPREAD",
            )
            .remote(grade.graders, grade.processes, grade.memory_mb)
        )
        self.hosts.append(host)
        return host

    async def _add_host(self) -> None:
        number, host = len(self.hosts), self._new_host()
        await host.start.remote()
        self._add(host, number)

    def _add(self, host: ActorHandle, number: int) -> None:
        assert self.queue is not None
        for index in range(self.grade_config.processes):
            self.queue.add_slot(RemoteSlot(host, index, f"host-{number}/{index}"))
        self.queue.add_loop(RemoteSlot(host, None, f"host-{number}/loop"))

    async def attach(self, plan: str = "", worker: str = "") -> None:
        """A Grade actor of a plan is up: the run should have as many hosts as the widest plan has such actors.

        Args:
            plan: name of the plan; actors of different plans do not add up.
            worker: id of the actor, so that one that comes back counts once; empty: each call counts.
        """
        await self.start()
        workers = self.attached.setdefault(plan, set())
        workers.add(worker or f"#{len(workers)}")
        while len(self.hosts) < min(self.most, len(workers)):
            task = asyncio.create_task(self._add_host())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(0)

    async def grade(self, rows: list[Sample]) -> list[dict[str, Any]]:
        """The GRADE_COLUMNS of each row, in order (see `GradeQueue.grade`)."""
        await self.start()
        return await asyncio.gather(*map(self._grade_once, rows))

    async def _grade_once(self, row: Sample) -> dict[str, Any]:
        assert self.queue is not None
        results = self.results.setdefault(row["iteration"], {})
        task = results.get(row["sample_id"])
        if task is None:
            task = results[row["sample_id"]] = asyncio.create_task(self.queue.grade(row))
        return await asyncio.shield(task)

    async def forget(self, iteration: int) -> None:
        """Lets go of the results of an iteration, and ends what still waits for members that will not come."""
        if self.queue:
            self.queue.forget(iteration)
        self.results.pop(iteration, None)

    async def stats(self) -> dict[str, Any]:
        """Counts since the start (see `GradeQueue.stats`), and the number of hosts."""
        return {"hosts": len(self.hosts), **(self.queue.stats() if self.queue else {})}

    async def close(self) -> None:
        """Ends every host with its processes."""
        if self.queue:
            await self.queue.close()
        for host in self.hosts:
            with contextlib.suppress(ray.exceptions.RayError):
                await host.close.remote()
            ray.kill(host)
