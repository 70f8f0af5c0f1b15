"""The parent's end of one grader process: start or copy it, ask it, kill it.

In: frames of `child.py`. Out: its answers, and `Reply` for calls, whatever the process did. What it sends is checked:
a process that sends anything but answers is killed.
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
from dataclasses import asdict
from pathlib import Path

from raypipe.config import GraderConfig, grader_name
from raypipe.grading import wire
from raypipe.grading.child import BEAT
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
HELLO_LIMIT_S = 60.0
KILL_LIMIT_S = 15.0
# Of a process whose keeper was killed itself, by whoever kills more than this process.
SILENT = "ended without a word"


class GraderStartError(ValueError):
    """A grader could not be built: names it and shows its traceback."""


class GraderProcess:
    """One process. When it and all below it are gone, `ended` is set and `report` says why."""

    def __init__(self, data: socket.socket, control: socket.socket, keeper: subprocess.Popen[bytes] | None = None):
        self.data, self.control, self.keeper = data, control, keeper
        self.report, self.tail = SILENT, ""
        self.ended = asyncio.Event()
        self.last_id = 0
        self.last_beat = time.monotonic()
        hello = asyncio.get_running_loop().create_future()
        self.answers: dict[int, asyncio.Future[Message]] = {0: hello}
        self.opening = asyncio.create_task(self._open())

    @classmethod
    def start(cls, limits: Limits, siblings: int) -> "GraderProcess":
        """A new interpreter, with no grader loaded, for one of so many processes that run calls at the same time."""
        (data, data_end), (control, control_end) = socket.socketpair(), socket.socketpair()
        fds = (data_end.fileno(), control_end.fileno())
        root = str(Path(__file__).parents[2])
        environment = os.environ | ENVIRONMENT | {"RAYPIPE_GRADER_PROCESSES": str(siblings)}
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
            if self.report == SILENT:
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
        names = ("data_source", "response_text", "ground_truth", "extra_info", "prompt")
        rows = [[*(row[name] for name in names), told(row)] for row in samples]
        start, had_ended = time.perf_counter(), self.ended.is_set()
        message = {"op": "call", "grader": grader, "samples": rows, "timeout_s": limit_s}
        try:
            answer = await self.ask(message, limit_s + grace_s)
        except TimeoutError:
            self.kill()
            await self.ended.wait()
            return Reply("timeout", [], f"took more than {limit_s:g} s", time.perf_counter() - start, ended=True)
        except EOFError:
            status = "lost" if self.report == SILENT or had_ended else "crash"
            return Reply(status, [], f"its process {self.report}", time.perf_counter() - start, ended=True)
        seconds = answer.get("seconds")
        if isinstance(seconds, float) and 0 <= seconds:
            if valid_entries(answer.get("entries"), len(samples)):
                return Reply("ok", answer["entries"], "", seconds)
            if answer.get("status") in ("error", "crash", "timeout"):
                return Reply(answer["status"], [], str(answer.get("error")), seconds, answer.get("retry") is True)
        self.kill(f"was stopped: it sent {str(answer)[:200]}")
        await self.ended.wait()
        return Reply("crash", [], f"its process {self.report}", time.perf_counter() - start, ended=True)


def told(row: Sample) -> Message:
    """What extra_infos hold besides the data's own. A text without tokens is one whose tokens nobody has counted."""
    if row["response_text"] and not row["response_ids"]:
        return {"prompt_text": row["prompt_text"]}
    return {name: row[name] for name in ("prompt_text", "response_ids", "response_length")}


def last_words(output: str) -> str:
    """The line of a process's output that says most about its end: of a fault's traceback, where it was."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    fault = next((i for i, line in enumerate(lines[:-1]) if line.endswith("(most recent call first):")), len(lines) - 2)
    return f"; last output: {lines[fault + 1][:500]}"
