"""The grader process: loads every grader of the run once, then answers calls until its parent hangs up.

In: frames `{"op": ...}` on a socket. Out: `{"id": 0}` once it serves, then one frame for each load and call.

    load    {"id", "path", "kwargs", "sys_path"}
            -> {"id", "ok": true, "is_async": bool, "not_forkable": str} or {"id", "ok": false, "error", "traceback"}
    call    {"id", "grader": index, "samples": [sample, ...]} (see `arguments`)
            -> {"id", "seconds", "entries": [{"score", "values"} | {"error"}, ...]}
            or {"id", "seconds", "status": "error" | "crash" | "timeout", "error", "retry"}
    serve   from now on calls run side by side in one event loop, each within its "timeout_s" (async graders only);
            frames {"id": -1} say meanwhile that no call holds up the others
    spawn   two file descriptors follow: fork a process that serves on them with the graders as they are here

`spawn` is why a replacement costs milliseconds: a process that loaded sympy once is copied, not built again. It is used
where a copy is safe (`not_forkable` is empty): one thread, no child process, no file, socket or device that the graders
hold open, since both would share it.
"""

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from raypipe.adapters import load_grader
from raypipe.grading import keeper, scores, wire
from raypipe.grading.wire import Message

MAX_REQUEST_BYTES = 1 << 31
BEAT, BEAT_S = -1, 0.5


def main() -> None:
    """`python -m raypipe.grading.child DATA_FD CONTROL_FD LIMITS`, started by `processes.py`."""
    data, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    keeper.remove_stale_folders()
    keeper.keep(control, GraderProcess(data, []).serve, keeper.Limits(**json.loads(sys.argv[3])))


class GraderProcess:
    """The far end of a `processes.GraderProcess`."""

    def __init__(self, data: socket.socket, graders: list[Any]):
        self.data, self.graders = data, graders
        self.files: set[str] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def serve(self) -> None:
        faulthandler.enable()
        self.files = set(os.listdir("/proc/self/fd"))
        wire.send(self.data, {"id": 0})
        while (message := wire.receive(self.data)) is not None:
            match message["op"]:
                case "call":
                    wire.send(self.data, {"id": message["id"], **self.call(message)})
                case "load":
                    wire.send(self.data, {"id": message["id"], **self.load(message)})
                case "spawn":
                    self.spawn(message)
                case "serve":
                    return asyncio.run(self.serve_async())

    def load(self, message: Message) -> Message:
        sys.path[:] = message["sys_path"]
        try:
            grader = load_grader(message["path"], message["kwargs"])
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))[-4 * scores.MAX_TEXT :]
            return {"ok": False, "error": scores.describe(error), "traceback": trace}
        self.graders.append(grader)
        gc.collect()
        gc.freeze()  # the collector would otherwise touch, and so copy, every page that forks share
        is_async = inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(type(grader).__call__)
        return {"ok": True, "is_async": is_async, "not_forkable": why_not_forkable(self.files)}

    def spawn(self, message: Message) -> None:
        _, fds, _, _ = socket.recv_fds(self.data, 1, 2)
        data, control = (socket.socket(fileno=fd) for fd in fds)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
        try:
            child = os.fork()
        except OSError:  # too many processes for now; the parent sees the sockets close, and asks again
            child = -1
        if child == 0:
            os.setsid()
            self.data.close()
            keeper.keep(control, GraderProcess(data, self.graders).serve, keeper.Limits(**message["limits"]))
        data.close()
        control.close()

    def call(self, message: Message) -> Message:
        start = time.perf_counter()
        try:
            result = self.graders[message["grader"]](**arguments(message["samples"]))
            if inspect.isawaitable(result):
                self.loop = self.loop or asyncio.new_event_loop()
                result = self.loop.run_until_complete(result)
            reply: Message = {"entries": scores.entries(result, len(message["samples"]))}
        except BaseException as error:
            reply = scores.failure(error)
        return {"seconds": time.perf_counter() - start, **reply}

    async def serve_async(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self.data)
        tasks: set[asyncio.Task[None]] = {asyncio.create_task(self.beat(writer))}
        while (message := await wire.read(reader, MAX_REQUEST_BYTES)) is not None:
            task = asyncio.create_task(self.answer(message, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(wire.encode({"id": BEAT}))
            await asyncio.sleep(BEAT_S)

    async def answer(self, message: Message, writer: asyncio.StreamWriter) -> None:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(message["timeout_s"]) as deadline:
                result = await self.graders[message["grader"]](**arguments(message["samples"]))
            reply: Message = {"entries": scores.entries(result, len(message["samples"]))}
        except BaseException as error:
            reply = scores.failure(error)
            if deadline.expired():
                reply = {"status": "timeout", "error": f"took more than {message['timeout_s']:g} s", "retry": False}
        writer.write(wire.encode({"id": message["id"], "seconds": time.perf_counter() - start, **reply}))
        await writer.drain()


def why_not_forkable(files_before: set[str]) -> str:
    """Why a copy of this process would not be safe; empty when it is."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "child processes"
    for fd in sorted(set(os.listdir("/proc/self/fd")) - files_before):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            return f"an open file, {os.readlink(f'/proc/self/fd/{fd}')}"
    return ""


def arguments(samples: list[list[Any]]) -> Message:
    """The grader's four lists, from [data_source, response, ground_truth, extra_info, prompt, told] of each sample.

    The prompt and what `told` has of the response join `extra_infos` unless the data has its own.
    """
    extra_infos = []
    for _, _, _, extra_info, prompt, told in samples:
        extra = json.loads(extra_info) if extra_info else None
        own = extra if isinstance(extra, dict) else {}
        extra_infos.append({"prompt": json.loads(prompt), **told, **own})
    return {
        "data_sources": [sample[0] for sample in samples],
        "solution_strs": [sample[1] for sample in samples],
        "ground_truths": [json.loads(sample[2]) if sample[2] else None for sample in samples],
        "extra_infos": extra_infos,
    }


if __name__ == "__main__":
    main()
