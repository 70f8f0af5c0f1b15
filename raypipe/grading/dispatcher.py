"""The run's one grading queue: a resident Ray actor between the Grade stages of all plans and the hosts of all nodes.

In: rows that are generated. Out: their GRADE_COLUMNS. One queue for the whole run, so that batches form across blocks,
groups and plans, work goes to whichever process of whichever node is free, and the rate of async graders is the run's.

Ray Data scales the Grade stage: every actor of it that attaches asks for one more host, up to the most that
`grade.workers` allows. Hosts stay for the run.

A row is known by its plan, its `sample_id` and what was generated. Whoever asks for one joins the grading in progress
or gets the result that was kept: the Grade stage, when a block comes to it whose samples hints had told of, and one
that died and asks again. `forget(plan)` lets go of all that a plan left here.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from raypipe.config import GradeConfig
from raypipe.grading.host import GraderHost
from raypipe.grading.queue import GradeQueue
from raypipe.grading.results import Reply, Sample, not_graded
from raypipe.live import Live, grading_metrics
from raypipe.watchdog import ANSWER_S, oldest, stacks

# Calls that may wait in an actor: past every sample of every plan.
MAX_CONCURRENCY = 100_000
HOST_RETURN_LIMIT_S = 900.0
CLOSE_LIMIT_S = 20.0

logger = logging.getLogger(__name__)


def start_dispatcher(grade: GradeConfig, hosts: tuple[int, int], run_name: str, cpus_per_host: float) -> ActorHandle:
    """Starts the actor `{run_name}/grade-dispatcher`; its `start()` builds the graders and raises what is wrong.

    Args:
        grade: the configuration's section.
        hosts: (fewest, most) grader hosts (`config.grader_actors`).
        run_name: prefix of the actor's name.
        cpus_per_host: CPUs that each host reserves.
    """
    actor: Any = ray.remote(GradeDispatcher)
    return actor.options(
        name=f"{run_name}/grade-dispatcher",
        num_cpus=0,
        max_concurrency=MAX_CONCURRENCY,
        max_restarts=-1,
        max_task_retries=-1,  # grade() is idempotent
    ).remote(grade, hosts, cpus_per_host)


class RemoteSlot:
    """One process of a host as the queue sees it; without an index, the one that runs async graders."""

    def __init__(self, host: ActorHandle, index: int | None, name: str, since: dict[str, float]):
        self.host, self.index, self.name, self.since = host, index, name, since

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        ids = [f"{sample['sample_id']} in {self.name}" for sample in samples]
        self.since.update(dict.fromkeys(ids, time.time()))
        try:
            return await self.host.call.remote(self.index, grader, samples, limit_s)
        except ray.exceptions.RayActorError as error:
            return Reply("lost", error=f"{self.name} is gone: {error}", ended=True)
        finally:
            for name in ids:
                self.since.pop(name, None)

    async def ready(self) -> None:
        """Returns once the host is back, with its graders built; Ray starts it again meanwhile."""
        async with asyncio.timeout(HOST_RETURN_LIMIT_S):
            while True:
                try:
                    return await self.host.ready.remote(self.index)
                except ray.exceptions.RayActorError:
                    await asyncio.sleep(0.2)


class GradeDispatcher:
    """Args:
    grade: the configuration's section.
    hosts: (fewest, most) grader hosts.
    cpus_per_host: CPUs that each host reserves.
    """

    queue: GradeQueue

    def __init__(self, grade: GradeConfig, hosts: tuple[int, int], cpus_per_host: float):
        self.config, self.cpus_per_host = grade, cpus_per_host
        self.fewest, self.most = hosts
        self.hosts: list[ActorHandle] = []
        self.up: list[ActorHandle] = []  # those of them that have started
        self.attached: dict[str, set[str]] = {}
        self.results: dict[str, dict[tuple[Any, ...], asyncio.Task[dict[str, Any]]]] = {}  # by plan, then row
        self.forgotten: set[str] = set()
        self.since: dict[str, float] = {}  # samples that are called with, and since when
        self.live = Live()
        self.starting: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts the first hosts, once. Raises GraderStartError (a ValueError) when a grader cannot be built."""
        if self.starting is None:
            self.starting = asyncio.create_task(self._start())
        await asyncio.shield(self.starting)

    async def _start(self) -> None:
        config = self.config
        host = self._new_host()
        is_async = await host.start.remote()
        self.queue = GradeQueue(config.graders, is_async, config.async_concurrency, config.async_rate, config.retries)
        await self._add(host, 0)
        self._keep(self.live.report(self.queue.stats, grading_metrics))
        await asyncio.gather(*(self._add(self._new_host(), number) for number in range(1, self.fewest)))

    def _new_host(self) -> ActorHandle:
        actor: Any = ray.remote(GraderHost)
        host = actor.options(
            num_cpus=self.cpus_per_host,
            max_restarts=-1,
            max_concurrency=MAX_CONCURRENCY,
            # Ray 2.60 spreads over all nodes, whatever their labels; else it fills one that has them, then the next.
            scheduling_strategy="DEFAULT" if self.config.node_labels else "SPREAD",
            label_selector=self.config.node_labels,
        ).remote(self.config.graders, self.config.processes, self.config.memory_mb)
        self.hosts.append(host)
        return host

    async def _add(self, host: ActorHandle, number: int) -> None:
        """Adds the slots of a host to the queue once its graders are built."""
        is_async = await host.start.remote()
        self.up.append(host)
        for index in range(self.config.processes):
            self.queue.add_slot(RemoteSlot(host, index, f"host-{number}/{index}", self.since))
        if any(is_async):
            self.queue.add_loop(RemoteSlot(host, None, f"host-{number}/loop", self.since))

    async def attach(self, plan: str = "", worker: str = "") -> None:
        """A Grade actor of a plan is up: the run should have as many hosts as its widest plan has such actors.

        Args:
            plan: name of the plan; actors of different plans do not add up.
            worker: id of the actor, so that one that comes back counts once; empty: each call counts.
        """
        await self.start()
        workers = self.attached.setdefault(plan, set())
        workers.add(worker or f"#{len(workers)}")
        while len(self.hosts) < min(self.most, len(workers)):
            number = len(self.hosts)
            self._keep(self._add_later(self._new_host(), number))

    async def _add_later(self, host: ActorHandle, number: int) -> None:
        try:
            await self._add(host, number)
        except (ValueError, ray.exceptions.RayError) as error:
            logger.error("grader host %d cannot be used: %s", number, error)
            ray.kill(host)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def hint(self, rows: list[Sample]) -> None:
        """Samples are finished and will come by their plan: grades them now. Nothing depends on this call."""
        await self.start()
        for row in rows:
            if row["plan"] not in self.forgotten:
                self._graded(row)

    async def grade(self, rows: list[Sample]) -> list[dict[str, Any]]:
        """The GRADE_COLUMNS of each row (see `rows.to_grade` and `GradeQueue.grade`), in order."""
        await self.start()
        return await asyncio.gather(*map(self._collect, rows))

    async def _collect(self, row: Sample) -> dict[str, Any]:
        if row["plan"] in self.forgotten:  # a straggler: nobody reads its plan any more
            return not_graded("its plan was abandoned")
        return await asyncio.shield(self._graded(row))

    def _graded(self, row: Sample) -> asyncio.Task[dict[str, Any]]:
        """The one grading of a row. A sample that was generated anew, with another response, is another row."""
        results = self.results.setdefault(row["plan"], {})
        key = (row["sample_id"], row["response_text"], row.get("finish_reason"))
        if key not in results:
            results[key] = asyncio.create_task(self._grade(row))
        return results[key]

    async def _grade(self, row: Sample) -> dict[str, Any]:
        arrived = time.time()
        graded = await self.queue.grade(row)
        if math.isfinite(graded["grade_start"]):
            self.live.observe("grade_lag_seconds", max(0.0, graded["grade_start"] - arrived))
        return graded

    async def forget(self, plan: str) -> None:
        """Lets go of a plan's results, and ends what still waits for members that will not come."""
        await self.start()
        self.forgotten.add(plan)
        self.queue.forget(plan)
        self.results.pop(plan, None)
        self.attached.pop(plan, None)

    async def stats(self) -> dict[str, Any]:
        """Counts since the start (see `GradeQueue.stats`), hosts that are up, results kept, and this process's id."""
        await self.start()
        kept = sum(map(len, self.results.values()))
        return {"hosts": len(self.up), "kept": kept, "pid": os.getpid(), **self.queue.stats()}

    async def doing(self) -> list[str]:
        """What a stalled run shows of grading; a host that does not answer is started again."""
        stats = self.queue.stats() if self.up else {"running": 0, "queued": 0}
        lines = [f"{stats['running']} samples run, {stats['queued']} wait", *oldest(self.since), *stacks()]
        for number, host in enumerate(self.up):
            try:
                async with asyncio.timeout(ANSWER_S / 2):
                    lines += [f"host-{number}: {line}" for line in await host.doing.remote()]
            except TimeoutError:
                lines.append(f"host-{number}: does not answer, and is started again")
                ray.kill(host, no_restart=False)
            except ray.exceptions.RayActorError as error:
                lines.append(f"host-{number}: {error}")
        return lines

    async def close(self) -> None:
        """Ends every host with its processes."""
        for task in self.tasks:
            task.cancel()
        if self.up:
            self.queue.close()
            closing = [asyncio.ensure_future(host.close.remote()) for host in self.up]
            await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
        for host in self.hosts:
            ray.kill(host)
