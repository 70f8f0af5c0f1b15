"""The parent's end of grader processes: start, call, kill, replace.

In: calls of a grader with samples. Out: a `Reply` each, whatever the process did. A process that dies or is killed is
replaced in the background, by a copy of a template that has the graders loaded where that is safe (`child.py`), else by
a new start.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from raypipe.config import GraderConfig
from raypipe.grading import wire
from raypipe.grading.results import Reply, valid_entries

# Samples run side by side in processes; threads of numerical libraries inside each would only fight over the cores.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
KILL_LIMIT_S = 15.0
STARTS = 3

Sample = dict[str, Any]


class GraderStartError(ValueError):
    """A grader could not be built: names it and shows its traceback."""


class GraderProcess:
    """One process: frames to and from it by id, and its keeper's last word."""

    def __init__(self, data: socket.socket, control: socket.socket, keeper: subprocess.Popen[bytes] | None = None):
        self.data, self.control, self.keeper = data, control, keeper
        self.report = self.tail = ""
        self.ended = asyncio.Event()
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.next_id = 0

    @classmethod
    async def start(cls, memory_mb: int, shares: int, namespaces: bool) -> "GraderProcess":
        """A new interpreter with no grader loaded yet."""
        (data, data_end), (control, control_end) = socket.socketpair(), socket.socketpair()
        fds = (data_end.fileno(), control_end.fileno())
        command = [sys.executable, "-m", "raypipe.grading.child", *map(str, (*fds, memory_mb, shares, int(namespaces)))]
        environment = {**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        keeper = subprocess.Popen(command, env=environment, pass_fds=fds, start_new_session=True)
        data_end.close()
        control_end.close()
        return await cls(data, control, keeper)._connect()

    async def spawn(self, memory_mb: int, namespaces: bool) -> "GraderProcess":
        """A copy of this process, graders and all."""
        (data, data_end), (control, control_end) = socket.socketpair(), socket.socketpair()
        self.writer.write(wire.encode({"op": "spawn", "memory_mb": memory_mb, "namespaces": namespaces}))
        await self.writer.drain()
        socket.send_fds(self.data, [b"f"], [data_end.fileno(), control_end.fileno()])
        data_end.close()
        control_end.close()
        return await GraderProcess(data, control)._connect()

    async def _connect(self) -> "GraderProcess":
        self.reader, self.writer = await asyncio.open_connection(sock=self.data)
        self.control_reader, self.control_writer = await asyncio.open_connection(sock=self.control)
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    async def _read(self) -> None:
        try:
            while (message := await wire.read(self.reader)) is not None:
                future = self.waiting.get(message.get("id", -1))
                if future is None or future.done():
                    raise wire.ProtocolError(f"an answer to no question: {str(message)[:80]}")
                future.set_result(message)
        except (wire.ProtocolError, TypeError) as error:
            self.report = f"sent {error}"
            self.kill()

    async def _watch(self) -> None:
        """Waits for the keeper's report, which is its last act: after it no process is left."""
        data = await self.control_reader.read()
        with contextlib.suppress(ValueError, KeyError):
            report = json.loads(data)
            lines = [line for line in report["tail"].strip().splitlines() if line]
            self.report = self.report or report["reason"] + (f"; last output: {lines[-1][:500]}" if lines else "")
            self.tail = report["tail"]
        self.ended.set()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(EOFError())
        self.writer.close()
        self.control_writer.close()
        if self.keeper:
            await asyncio.get_running_loop().run_in_executor(None, self.keeper.wait)

    def kill(self) -> None:
        """Orders the keeper to kill everything; `ended` is set when it has."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_LIMIT_S):
                await asyncio.wait(self.tasks)

    async def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends a frame and waits for its answer. Raises TimeoutError past `limit_s`, EOFError when the process ends."""
        if self.ended.is_set():
            raise EOFError
        self.next_id += 1
        key = self.next_id
        future = self.waiting[key] = asyncio.get_running_loop().create_future()
        try:
            self.writer.write(wire.encode({**message, "id": key}))
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):
                    await self.writer.drain()
                return await future
        finally:
            del self.waiting[key]

    async def load(self, graders: Sequence[GraderConfig], names: Sequence[str], limit_s: float) -> dict[str, Any]:
        specs = [{"path": g.path, "kwargs": g.kwargs, "name": n} for g, n in zip(graders, names, strict=True)]
        try:
            reply = await self.ask({"op": "load", "graders": specs, "sys_path": sys.path}, limit_s)
        except TimeoutError:
            await self.close()
            raise GraderStartError(f"the graders {list(names)} took more than {limit_s:g} s to build") from None
        except EOFError:
            raise GraderStartError(
                f"the process that builds the graders {list(names)} {self.report}\n{self.tail}"
            ) from None
        if not reply["ok"]:
            await self.close()
            raise GraderStartError(
                f"the grader {reply['grader']!r} could not be built: {reply['error']}\n{reply['traceback']}"
            )
        return reply

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float, grace_s: float = 0.0) -> Reply:
        """Calls a grader. Past `limit_s + grace_s` the process is killed; with a grace it is told `limit_s` and may obey."""
        rows = [
            [s["data_source"], s["response_text"], s["ground_truth"], s["extra_info"], s["prompt_text"]]
            for s in samples
        ]
        start = time.perf_counter()
        try:
            message = {"op": "call", "grader": grader, "samples": rows, "timeout_s": limit_s}
            answer = await self.ask(message, limit_s + grace_s)
        except TimeoutError:
            self.kill()
            await self.ended.wait()
            return Reply("timeout", [], f"took more than {limit_s:g} s", time.perf_counter() - start, ended=True)
        except EOFError:
            await self.ended.wait()
            return Reply("crash", [], f"its process {self.report}", time.perf_counter() - start, ended=True)
        return self._checked(answer, len(samples))

    def _checked(self, answer: dict[str, Any], count: int) -> Reply:
        seconds = answer.get("seconds")
        if isinstance(seconds, float) and seconds >= 0:
            if valid_entries(answer.get("entries"), count):
                return Reply("ok", answer["entries"], "", seconds)
            if answer.get("status") in ("error", "crash", "timeout"):
                return Reply(answer["status"], [], str(answer.get("error")), seconds, bool(answer.get("retry")))
        self.kill()
        return Reply("crash", [], f"its process sent {str(answer)[:200]}", 0.0, ended=True)


class GraderProcesses:
    """The grader processes of one machine: `count` that run one call each, and one event loop for async graders."""

    def __init__(
        self, graders: Sequence[GraderConfig], names: Sequence[str], count: int, memory_mb: int, start_limit_s: float = 600.0,
        namespaces: bool = True,
    ):  # fmt: skip
        self.graders, self.names, self.count = graders, names, count
        self.memory_mb, self.start_limit_s, self.namespaces = memory_mb, start_limit_s, namespaces
        self.template: GraderProcess | None = None
        self.slots: list[asyncio.Task[GraderProcess]] = []
        self.loop_process: asyncio.Task[GraderProcess] | None = None
        self.is_async: list[bool] = []
        self.why_no_template = ""
        self.kills = 0

    async def start(self) -> None:
        """Builds the graders. Raises GraderStartError."""
        process = await self._build(self.count + 2)
        self.template = process if not self.why_no_template else None
        self.slots = [
            asyncio.create_task(self._new(process if self.why_no_template and i == 0 else None))
            for i in range(self.count)
        ]
        if any(self.is_async):
            self.loop_process = asyncio.create_task(self._new_loop())
        await asyncio.gather(*self.slots, *filter(None, [self.loop_process]))

    async def _build(self, shares: int) -> GraderProcess:
        process = await GraderProcess.start(self.memory_mb, shares, self.namespaces)
        reply = await process.load(self.graders, self.names, self.start_limit_s)
        self.is_async, self.why_no_template = reply["async"], reply["forkable"]
        return process

    async def _new(self, made: GraderProcess | None = None) -> GraderProcess:
        if made is not None:
            return made
        for attempt in range(STARTS):
            try:
                if self.why_no_template:
                    return await self._build(shares=1)
                if self.template is None or self.template.ended.is_set():
                    self.template = await self._build(self.count + 2)
                return await self.template.spawn(self.memory_mb, self.namespaces)
            except GraderStartError:
                if attempt == STARTS - 1:
                    raise
                await asyncio.sleep(attempt + 1)
        raise AssertionError

    async def _new_loop(self) -> GraderProcess:
        process = await self._new()
        process.writer.write(wire.encode({"op": "serve"}))
        return process

    async def call(self, slot: int, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        process = await self.slots[slot]
        reply = await process.call(grader, samples, limit_s)
        if reply.ended or process.ended.is_set():
            self.kills += 1
            self.slots[slot] = asyncio.create_task(self._new())
        return reply

    async def ready(self, slot: int) -> None:
        """Returns when the slot's process is there. Raises GraderStartError when it cannot be started again."""
        await asyncio.shield(self.slots[slot])

    async def call_in_loop(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        """A call of an async grader, beside others in one process. A call that blocks them all ends them all."""
        assert self.loop_process is not None
        task = self.loop_process
        process = await task
        reply = await process.call(grader, samples, limit_s, grace_s=1.0)
        if (reply.ended or process.ended.is_set()) and self.loop_process is task:
            self.kills += 1
            self.loop_process = asyncio.create_task(self._new_loop())
        return reply

    async def close(self) -> None:
        tasks = [*self.slots, *filter(None, [self.loop_process])]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in done if isinstance(process, GraderProcess)))
        if self.template:
            await self.template.close()
