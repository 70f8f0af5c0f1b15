"""The grader process: loads every grader of the run once, then answers calls until its parent hangs up.

In: frames `{"op": ...}` on a socket. Out: one frame for each.

    load    {"id", "graders": [{"path", "kwargs", "name"}], "sys_path"}
            -> {"id", "ok": true, "async": [bool], "forkable": str} or {"id", "ok": false, "grader", "error", "traceback"}
    call    {"id", "grader": index, "samples": [[data_source, response, ground_truth, extra_info, prompt], ...]}
            -> {"id", "seconds", "entries": [{"score", "values"} | {"error"}, ...]}
            or {"id", "seconds", "status": "error" | "crash" | "timeout", "error", "retry"}
    serve   from now on calls run side by side in one event loop, each with a "timeout_s" (async graders only)
    spawn   two file descriptors follow: fork a process with the graders as they are, which serves on them

`spawn` is why a replacement costs milliseconds: a process that loaded sympy once is copied, not built again. It is
offered (`forkable` is empty) only where a copy is safe: one thread, no child process, no file, socket or device that the
graders hold open, since two processes would share it. Standard library only, so that an instant grader starts instantly.
"""

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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raypipe.grading import keeper, wire

if TYPE_CHECKING:
    import asyncio

Message = dict[str, Any]

# Exceptions that mean "the other side could not be reached", by class name, so that no client library is imported:
# built in and requests; aiohttp; httpx; openai; urllib; DNS.
CONNECTION_ERRORS = {
    "ConnectionError", "ClientConnectionError", "NetworkError", "RemoteProtocolError", "ConnectTimeout",
    "APIConnectionError", "URLError", "gaierror", "herror",
}  # fmt: skip
NOT_CONNECTION_ERRORS = {"HTTPError", "APITimeoutError"}
MAX_TEXT = 2000
MAX_ITEMS = 100


def main() -> None:
    """`python -m raypipe.grading.child DATA_FD CONTROL_FD MEMORY_MB SHARES NAMESPACES`, started by `processes.py`."""
    data_fd, control_fd, memory_mb, shares, namespaces = map(int, sys.argv[1:])
    data, control = socket.socket(fileno=data_fd), socket.socket(fileno=control_fd)
    keeper.keep(control, lambda: Worker(data, []).serve(), memory_mb, shares, bool(namespaces))


class Worker:
    """One grader process, on one socket."""

    def __init__(self, data: socket.socket, graders: list[Any]):
        self.data = data
        self.graders = graders
        self.loop: "asyncio.AbstractEventLoop | None" = None

    def serve(self) -> None:
        faulthandler.enable()
        while (message := wire.receive(self.data)) is not None:
            match message["op"]:
                case "call":
                    wire.send(self.data, self.call(message))
                case "load":
                    wire.send(self.data, {"id": message["id"], **self.load(message)})
                case "spawn":
                    self.spawn(message)
                case "serve":
                    import asyncio

                    asyncio.run(self.serve_async())
                    return

    def load(self, message: Message) -> Message:
        sys.path[:] = message["sys_path"]
        files = set(os.listdir("/proc/self/fd"))
        for spec in message["graders"]:
            try:
                self.graders.append(load_grader(spec["path"], spec["kwargs"]))
            except BaseException as error:
                return {
                    "ok": False,
                    "grader": spec["name"],
                    "error": describe(error),
                    "traceback": "".join(traceback.format_exception(error))[-4 * MAX_TEXT :],
                }
        gc.collect()
        gc.freeze()
        is_async = [is_coroutine(grader) for grader in self.graders]
        return {"ok": True, "async": is_async, "forkable": why_not_forkable(files)}

    def spawn(self, message: Message) -> None:
        _, fds, _, _ = socket.recv_fds(self.data, 1, 2)
        data, control = (socket.socket(fileno=fd) for fd in fds)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
        if os.fork() == 0:
            os.setsid()
            self.data.close()
            worker = Worker(data, self.graders)
            keeper.keep(control, worker.serve, message["memory_mb"], 1, message["namespaces"])
        data.close()
        control.close()

    def call(self, message: Message) -> Message:
        start = time.perf_counter()
        try:
            result = self.graders[message["grader"]](**arguments(message["samples"]))
            if inspect.isawaitable(result):
                import asyncio

                self.loop = self.loop or asyncio.new_event_loop()
                result = self.loop.run_until_complete(_await(result))
            reply: Message = {"entries": entries(result, len(message["samples"]))}
        except BaseException as error:
            reply = failure(error)
        return {"id": message["id"], "seconds": time.perf_counter() - start, **reply}

    async def serve_async(self) -> None:
        import asyncio

        reader, writer = await asyncio.open_connection(sock=self.data)
        tasks: set[asyncio.Task[None]] = set()
        while (message := await wire.read(reader)) is not None:
            task = asyncio.create_task(self.call_async(message, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def call_async(self, message: Message, writer: "asyncio.StreamWriter") -> None:
        from asyncio import timeout

        start = time.perf_counter()
        try:
            async with timeout(message["timeout_s"]) as deadline:
                result = await self.graders[message["grader"]](**arguments(message["samples"]))
            reply: Message = {"entries": entries(result, len(message["samples"]))}
        except BaseException as error:
            reply = failure(error)
            if deadline.expired():
                reply["status"], reply["retry"] = "timeout", False
        writer.write(wire.encode({"id": message["id"], "seconds": time.perf_counter() - start, **reply}))
        await writer.drain()


def load_grader(path: str, kwargs: dict[str, Any]) -> Any:
    try:
        from raypipe.adapters import load_grader as load
    except ImportError:
        import importlib
        import importlib.util

        source, _, name = path.rpartition(":")
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location("grader_file", source)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        return getattr(module, name)(**kwargs)
    return load(path, kwargs)


async def _await(result: Any) -> Any:
    return await result


def is_coroutine(grader: Any) -> bool:
    return inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(type(grader).__call__)


def why_not_forkable(files_before: set[str]) -> str:
    """Why a copy of this process would not be safe; empty when it is."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "child processes"
    for fd in sorted(set(os.listdir("/proc/self/fd")) - files_before):
        with contextlib.suppress(OSError):
            return f"open file {os.readlink(f'/proc/self/fd/{fd}')}"
    return ""


def arguments(samples: list[list[Any]]) -> Message:
    """The grader's four lists. The prompt joins `extra_infos` unless the data has its own."""
    extra_infos = []
    for _, _, _, extra_info, prompt in samples:
        extra = json.loads(extra_info) if extra_info else {}
        extra_infos.append({"prompt": prompt, **extra} if isinstance(extra, dict) else {"prompt": prompt})
    return {
        "data_sources": [sample[0] for sample in samples],
        "solution_strs": [sample[1] for sample in samples],
        "ground_truths": [json.loads(sample[2]) if sample[2] else None for sample in samples],
        "extra_infos": extra_infos,
    }


def entries(result: Any, count: int) -> list[Message]:
    """What a call of `count` samples returned, as JSON values. Raises ValueError if it is no list of `count` scores."""
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise ValueError(f"returned {type(result).__name__}, not a list of {count} scores")
    scores = list(result)
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} samples")
    return [entry(score) for score in scores]


def entry(result: Any) -> Message:
    """One sample's score and named values, or what is wrong with it."""
    try:
        score, values = result, {}
        if isinstance(result, dict):
            if "score" not in result:
                return {"error": f'returned a dict without "score": {sorted(map(str, result))[:10]}'}
            score = result["score"]
            values = {str(k)[:MAX_TEXT]: plain(v) for k, v in list(result.items())[:MAX_ITEMS] if k != "score"}
        if score is None:
            return {"score": None, "values": values}
        if isinstance(score, str | bytes) or isinstance(score, complex):
            return {"error": f"returned {score!r:.100}, not a number"}
        number = float(score)
        if number - number != 0.0:
            return {"error": f"returned {number}, not a finite number"}
        return {"score": number, "values": values}
    except Exception as error:
        return {"error": f"returned {type(result).__name__}, not a score: {describe(error)}"}


def plain(value: Any, depth: int = 3) -> Any:
    """A named value as bounded JSON: text is cut, NaN becomes null, unknown types their text."""
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, int) or abs(value) < 1 << 63 else float(value)
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return plain(value.item(), 0) if depth else str(value)[:MAX_TEXT]
    if depth and isinstance(value, dict):
        return {str(k)[:MAX_TEXT]: plain(v, depth - 1) for k, v in list(value.items())[:MAX_ITEMS]}
    if depth and isinstance(value, list | tuple):
        return [plain(v, depth - 1) for v in value[:MAX_ITEMS]]
    return str(value)[:MAX_TEXT]


def failure(error: BaseException) -> Message:
    """An exception ends the call. One that is not an `Exception` (SystemExit, KeyboardInterrupt) would end a process."""
    return {
        "status": "error" if isinstance(error, Exception) else "crash",
        "error": describe(error),
        "retry": any(map(is_connection_error, causes(error))),
    }


def describe(error: BaseException) -> str:
    """The message of an exception and the line that raised it."""
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_TEXT]
    except BaseException:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return text + where


def causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 10:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def is_connection_error(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & CONNECTION_ERRORS) and not names & NOT_CONNECTION_ERRORS


if __name__ == "__main__":
    main()
