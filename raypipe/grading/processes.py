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
from dataclasses import asdict, replace
from pathlib import Path

from raypipe.config import GraderConfig, grader_name
from raypipe.grading import wire
from raypipe.grading.child import BEAT, BEAT_S
from raypipe.grading.keeper import Limits
from raypipe.grading.results import Reply, Sample, valid_entries
from raypipe.grading.wire import Message

# Samples run side by side in processes; threads of numerical libraries inside each would only fight over the cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# That a grader process with its descendants may be: far below a fork bomb, and above what the sandboxes of
# `graders.code` hold at worst, which run one for each CPU.
PROCESSES = 500 + 70 * (os.cpu_count() or 1)
MAX_HARD_PROCESSES = 30_000  # Linux numbers processes up to 32768 by default
HELLO_LIMIT_S = 60.0
KILL_LIMIT_S = 15.0
STARTS = 3
ASYNC_GRACE_S = 1.0
MAX_SILENCE_S = 2.0


class GraderStartError(ValueError):
    """A grader could not be built: names it and shows its traceback."""


class GraderProcess:
    """One process. When it and all below it are gone, `ended` is set and `report` says why."""

    def __init__(self, data: socket.socket, control: socket.socket, keeper: subprocess.Popen[bytes] | None = None):
        self.data, self.control, self.keeper = data, control, keeper
        self.report, self.tail = "ended without a word", ""
        self.ended = asyncio.Event()
        self.last_id = 0
        self.last_beat = time.monotonic()
        hello = asyncio.get_running_loop().create_future()
        self.answers: dict[int, asyncio.Future[Message]] = {0: hello}
        self.opening = asyncio.create_task(self._open())

    @classmethod
    def start(cls, limits: Limits) -> "GraderProcess":
        """A new interpreter, with no grader loaded."""
        (data, data_end), (control, control_end) = socket.socketpair(), socket.socketpair()
        fds = (data_end.fileno(), control_end.fileno())
        root = str(Path(__file__).parents[2])
        environment = os.environ | ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "raypipe.grading.child", *map(str, fds), json.dumps(asdict(limits))]
        keeper = subprocess.Popen(command, env=environment, pass_fds=fds, start_new_session=True)
        data_end.close()
        control_end.close()
        return cls(data, control, keeper)

    def spawn(self, limits: Limits) -> "GraderProcess":
        """A copy of this process, graders and all. Raises OSError if it is gone."""
        (data, data_end), (control, control_end) = socket.socketpair(), socket.socketpair()
        self.writer.write(wire.encode({"op": "spawn", "limits": asdict(limits)}))
        socket.send_fds(self.data, [b"f"], [data_end.fileno(), control_end.fileno()])
        data_end.close()
        control_end.close()
        return GraderProcess(data, control)

    async def serving(self) -> None:
        """Returns when the process serves. Raises EOFError or TimeoutError."""
        await asyncio.shield(self.opening)
        await self._answer(0, HELLO_LIMIT_S)

    async def _open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.data)
        self.control_reader, self.control_writer = await asyncio.open_connection(sock=self.control)
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def allow(self, times: int) -> None:
        """Lets the process and all below it hold so many times what its limits say."""
        with contextlib.suppress(OSError):
            self.control.send(bytes([min(times, 255)]))

    async def _read(self) -> None:
        try:
            while (message := await wire.read(self.reader, wire.MAX_REPLY_BYTES)) is not None:
                if message.get("id") == BEAT:
                    self.last_beat = time.monotonic()
                    continue
                answer = self.answers.get(message.get("id", ""))
                if answer is None or answer.done():
                    raise wire.ProtocolError(f"an answer to no question: {str(message)[:80]}")
                answer.set_result(message)
        except (wire.ProtocolError, TypeError) as error:
            self.kill(f"was stopped: it sent {error}")

    async def _watch(self) -> None:
        """Waits for the keeper's end, which is its last act: after it no process is left."""
        with contextlib.suppress(ValueError, KeyError, OSError):
            report = json.loads(await self.control_reader.read())
            self.tail = report["tail"]
            if self.report == "ended without a word":
                self.report = report["reason"] + last_words(self.tail)
        self.ended.set()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(EOFError())
                answer.exception()  # whoever asked may have stopped waiting
        self.writer.close()
        self.control_writer.close()
        if self.keeper:
            await asyncio.get_running_loop().run_in_executor(None, self.keeper.wait)

    def kill(self, reason: str = "") -> None:
        """Orders the keeper to kill everything; `ended` is set when it has."""
        self.report = reason or self.report
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        await self.opening
        self.kill()
        await asyncio.wait(self.tasks, timeout=KILL_LIMIT_S)

    async def ask(self, message: Message, limit_s: float) -> Message:
        """Sends a frame and waits for its answer. Raises TimeoutError past `limit_s`, EOFError at the process's end."""
        self.last_id += 1
        self.answers[self.last_id] = asyncio.get_running_loop().create_future()
        if not self.ended.is_set():
            self.writer.write(wire.encode({**message, "id": self.last_id}))
        return await self._answer(self.last_id, limit_s)

    async def _answer(self, key: int, limit_s: float) -> Message:
        try:
            if self.ended.is_set():
                raise EOFError
            async with asyncio.timeout(limit_s):
                return await self.answers[key]
        finally:
            del self.answers[key]

    async def load(self, grader: GraderConfig, limit_s: float) -> Message:
        """Builds a grader in the process. Raises GraderStartError."""
        name = grader_name(grader)
        spec = {"op": "load", "path": grader.path, "kwargs": grader.kwargs, "sys_path": sys.path}
        try:
            answer = await self.ask(spec, limit_s)
        except TimeoutError:
            raise GraderStartError(f"the grader {name!r} took more than {limit_s:g} s to build") from None
        except EOFError:
            reason = f"its process {self.report}\n{self.tail}"
            raise GraderStartError(f"the grader {name!r} could not be built: {reason}") from None
        if answer.get("ok") is not True:
            text = f"{answer.get('error')}\n{answer.get('traceback')}"
            raise GraderStartError(f"the grader {name!r} could not be built: {text}")
        return answer

    async def call(self, grader: int, samples: Sequence[Sample], limit_s: float, grace_s: float = 0.0) -> Reply:
        """Calls a grader within `limit_s`. The process is killed `grace_s` later, if it has not obeyed by itself."""
        rows = [
            [
                row["data_source"],
                row["response_text"],
                row["ground_truth"],
                row["extra_info"],
                {"prompt": row["prompt_text"], "response_length": row["response_length"]},
            ]
            for row in samples
        ]
        start = time.perf_counter()
        message = {"op": "call", "grader": grader, "samples": rows, "timeout_s": limit_s}
        try:
            answer = await self.ask(message, limit_s + grace_s)
        except TimeoutError:
            self.kill()
            await self.ended.wait()
            return Reply("timeout", [], f"took more than {limit_s:g} s", time.perf_counter() - start, ended=True)
        except EOFError:
            return Reply("crash", [], f"its process {self.report}", time.perf_counter() - start, ended=True)
        seconds = answer.get("seconds")
        if isinstance(seconds, float) and 0 <= seconds:
            if valid_entries(answer.get("entries"), len(samples)):
                return Reply("ok", answer["entries"], "", seconds)
            if answer.get("status") in ("error", "crash", "timeout"):
                return Reply(answer["status"], [], str(answer.get("error")), seconds, answer.get("retry") is True)
        self.kill(f"was stopped: it sent {str(answer)[:200]}")
        await self.ended.wait()
        return Reply("crash", [], f"its process {self.report}", time.perf_counter() - start, ended=True)


def last_words(output: str) -> str:
    """The line of a process's output that says most about its end: of a fault's traceback, where it was."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    fault = next((i for i, line in enumerate(lines[:-1]) if line.endswith("(most recent call first):")), len(lines) - 2)
    return f"; last output: {lines[fault + 1][:500]}"


class GraderProcesses:
    """The grader processes of one machine: `count` slots for one call each, and one event loop for async graders."""

    def __init__(
        self, graders: Sequence[GraderConfig], count: int, memory_mb: int, start_limit_s: float, namespaces: bool
    ):
        self.graders, self.count, self.start_limit_s = graders, count, start_limit_s
        self.limits = Limits(memory_mb, PROCESSES, 2 * PROCESSES, namespaces)
        self.living: set[GraderProcess] = set()
        self.template: asyncio.Task[GraderProcess] | None = None
        self.slots: list[asyncio.Task[GraderProcess]] = []
        self.loop: asyncio.Task[GraderProcess] | None = None
        self.watch: asyncio.Task[None] | None = None
        self.is_async: list[bool] = []
        self.not_forkable = ""
        self.closed = False

    async def start(self) -> None:
        """Builds the graders. Raises GraderStartError, with no process left."""
        try:
            first = asyncio.create_task(self._build())
            await first
            if self.not_forkable:
                self.slots = [first]
            else:
                self.template = first
            self.slots += [asyncio.create_task(self._new()) for _ in range(self.count - len(self.slots))]
            if any(self.is_async):
                self.loop = asyncio.create_task(self._new_loop())
            await asyncio.gather(*self._tasks())
        except BaseException:
            await self.close()
            raise

    def _tasks(self) -> list[asyncio.Task[GraderProcess]]:
        return [*self.slots, *filter(None, [self.loop, self.template])]

    async def _serving(self, process: GraderProcess) -> GraderProcess:
        self.living = {other for other in self.living if not other.ended.is_set()} | {process}
        await process.serving()
        return process

    async def _build(self) -> GraderProcess:
        """A new process with every grader loaded; it may hold copies of itself where that is safe."""
        try:
            limits = replace(self.limits, hard_processes=min(2 * PROCESSES * (self.count + 2), MAX_HARD_PROCESSES))
            process = await self._serving(GraderProcess.start(limits))
        except (EOFError, TimeoutError):
            raise GraderStartError(f"no grader process can be started ({sys.executable})") from None
        answers = [await process.load(grader, self.start_limit_s) for grader in self.graders]
        self.is_async = [answer.get("is_async") is True for answer in answers]
        self.not_forkable = str(answers[-1].get("not_forkable", "it did not say")) if answers else ""
        if not self.not_forkable:
            process.allow(self.count + 2)
        return process

    async def _new(self) -> GraderProcess:
        for attempt in range(STARTS):
            try:
                if self.template is None:
                    return await self._build()
                if self.template.done() and (self.template.exception() or self.template.result().ended.is_set()):
                    self.template = asyncio.create_task(self._build())
                template = await asyncio.shield(self.template)
                return await self._serving(template.spawn(self.limits))
            except (GraderStartError, EOFError, OSError) as error:  # TimeoutError is an OSError
                if attempt == STARTS - 1:
                    raise GraderStartError(str(error) or "grader processes end as soon as they start") from None
                await asyncio.sleep(attempt)
        raise AssertionError

    async def _new_loop(self) -> GraderProcess:
        process = await self._new()
        process.writer.write(wire.encode({"op": "serve"}))
        self.watch = asyncio.create_task(self._watch_loop(process))
        return process

    async def _watch_loop(self, process: GraderProcess) -> None:
        """Ends an event loop that one call holds up, and all other calls with it."""
        while not process.ended.is_set():
            await asyncio.sleep(BEAT_S)
            if time.monotonic() - process.last_beat > MAX_SILENCE_S:
                process.kill(f"was stopped: a call blocked its event loop for {MAX_SILENCE_S:g} s")

    async def call(self, slot: int, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        """One call in a slot, which must be free."""
        process = await self.slots[slot]
        reply = await process.call(grader, samples, limit_s)
        if reply.ended and not self.closed:
            self.slots[slot] = asyncio.create_task(self._new())
        return reply

    async def call_in_loop(self, grader: int, samples: Sequence[Sample], limit_s: float) -> Reply:
        """One call of an async grader, beside others in one process. One that blocks the process ends all of them."""
        assert self.loop is not None
        loop = self.loop
        reply = await (await asyncio.shield(loop)).call(grader, samples, limit_s, ASYNC_GRACE_S)
        if reply.ended and self.loop is loop and not self.closed:
            self.loop = asyncio.create_task(self._new_loop())
        return reply

    async def ready(self, slot: int | None) -> None:
        """Returns when the slot (None: the loop) has a process. Raises GraderStartError if it gets none any more."""
        if self.closed:
            raise GraderStartError("grading was closed")
        task = self.loop if slot is None else self.slots[slot]
        if task:
            await asyncio.shield(task)

    async def close(self) -> None:
        """Ends every process."""
        self.closed = True
        for task in (*self._tasks(), self.watch):
            if task:
                task.cancel()
        await asyncio.gather(*self._tasks(), return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self.living))
