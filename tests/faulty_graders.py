"""Graders for the tests of grading. `Faulty` does to itself what the response says; the others behave.

Imports the standard library only, since grader processes load this file.
"""

import asyncio
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time


class Length:
    """Scores the length of the response."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [float(len(text)) for text in solution_strs]


class Echo:
    """Returns what the response says, as JSON; "nan" and "inf" are those floats."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [json.loads(text) for text in solution_strs]


class Seen:
    """Returns, as named values, what it was called with."""

    def __init__(self, unit="points"):
        self.unit = unit

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        call = {"batch": len(solution_strs), "unit": self.unit, "pid": os.getpid()}
        return [{"score": 1.0, **dict(zip(names, row, strict=True)), **call} for row in rows]


class Sleep:
    """Sleeps as many seconds a sample as the response says, and `fixed` a call."""

    def __init__(self, fixed=0.0):
        self.fixed = fixed

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        time.sleep(self.fixed + sum(map(float, solution_strs)))
        return [1.0] * len(solution_strs)


class SlowStart:
    """Its first call in a process takes a second more, as one that loads a model does."""

    def __init__(self):
        self.loaded = False

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        if not self.loaded:
            time.sleep(1.0)
        self.loaded = True
        return [1.0] * len(solution_strs)


class Thread:
    """Holds a thread, so that its process cannot be copied."""

    def __init__(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        if "crash" in solution_strs:
            os._exit(1)
        return [1.0] * len(solution_strs)


class Leaky:
    """Crashes at its third call in a process, whoever is graded then."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        self.calls += 1
        if self.calls == 3:
            os._exit(1)
        return [1.0] * len(solution_strs)


class Broken:
    """Its constructor does what `how` says."""

    def __init__(self, how):
        if how == "raise":
            raise LookupError("no such model: small-judge")
        if how == "exit":
            print("could not read the licence", file=sys.stderr)
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "hang":
            time.sleep(3600)
        if how == "SystemExit":
            raise SystemExit("wrong licence")


class Spread:
    """A group grader: each sample's score is its rank in the group."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        if "crash" in solution_strs:
            os._exit(1)
        order = sorted(solution_strs)
        return [{"score": float(order.index(text)), "group": len(solution_strs)} for text in solution_strs]


class AsyncServer:
    """Asks a local server, one request a call, and scores the number that it answers."""

    def __init__(self, port):
        self.port = port

    async def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(json.dumps(solution_strs).encode() + b"\n")
            answer = await reader.readline()
        finally:
            writer.close()
        if not answer:
            raise ConnectionResetError("the server hung up")
        return [float(answer)] * len(solution_strs)


class AsyncFaulty:
    """`wait SECONDS`, `hang`, `raise`, `block` (the event loop), `stubborn` (ignores cancellation), `segfault`."""

    async def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        what, *seconds = solution_strs[0].split()
        match what:
            case "wait":
                await asyncio.sleep(float(seconds[0]))
            case "hang":
                await asyncio.sleep(3600)
            case "raise":
                raise ValueError("no verdict")
            case "block":
                time.sleep(3600)
            case "stubborn":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
            case "segfault":
                ctypes.string_at(0)
        return [1.0] * len(solution_strs)


class Judgement(BaseException):
    """As math-verify's TimeoutException, not an Exception."""


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Liar(list):
    """Says that it is longer than it is."""

    def __len__(self):
        return 1_000_000


class Faulty:
    """Scores 1.0, unless a response is the name of a fault: then the whole call suffers it."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        for text in solution_strs:
            if hasattr(self, text):
                result = getattr(self, text)()
                if result is not None:
                    return result
        return [1.0] * len(solution_strs)

    # Never returns.
    def hang(self):
        time.sleep(3600)

    def spin(self):
        while True:
            pass

    def spin_without_switching_threads(self):
        sum(range(10**15))

    def block_signals(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)

    def stop_itself(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def print_forever(self):
        line = "x" * 100_000
        while True:
            print(line)

    def hang_with_children(self):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()
        time.sleep(3600)

    def hang_with_daemons(self):
        for _ in range(3):
            daemon()
        time.sleep(3600)

    # Ends the process.
    def segfault(self):
        ctypes.string_at(0)

    def exit_0(self):
        os._exit(0)

    def exit_3(self):
        print("giving up", file=sys.stderr)
        os._exit(3)

    def abort(self):
        os.abort()

    def kill_itself(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_everything(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def terminate_itself(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def overflow_the_stack(self):
        sys.setrecursionlimit(10**9)
        threading.stack_size(0)
        loop = ctypes.CFUNCTYPE(ctypes.c_int)

        @loop
        def again():
            return again()

        again()

    def eat_memory(self):
        hoard = []
        while True:
            hoard.append(b"x" * (8 << 20))

    def eat_memory_in_children(self):
        for _ in range(4):
            multiprocessing.get_context("fork").Process(target=hold, args=(100 << 20,)).start()
        time.sleep(3600)

    def fork_bomb(self):
        """Every process of it forks on, up to 200 in all, so that the machine of the tests is never at risk."""
        forks = mmap.mmap(-1, 200)
        with contextlib.suppress(OSError):
            while (number := forks.find(b"\0")) >= 0:
                forks[number] = 1
                os.fork()
        time.sleep(60)

    def hop(self):
        """A chain of processes, each of which starts the next in a session of its own and ends."""
        if os.fork() == 0:
            while True:
                os.setsid()
                if os.fork():
                    os._exit(0)
        os._exit(1)

    def crash_with_daemons(self):
        for _ in range(3):
            daemon()
        os._exit(1)

    def crash_with_loud_daemon(self):
        if os.fork() == 0:
            os.setsid()
            while True:
                print("x" * 100_000)
        os._exit(1)

    def close_everything(self):
        os.closerange(0, 1000)

    def write_everywhere(self):
        for fd in range(3, 100):
            with contextlib.suppress(OSError):
                os.write(fd, b"\xff" * 100)
        time.sleep(3600)

    def answer_unasked(self):
        self._send({"id": 987654, "entries": []})
        time.sleep(3600)

    def answer_nonsense(self):
        self._send({"id": [1], "seconds": "long"})
        time.sleep(3600)

    def answer_falsely(self):
        """A well-formed answer to the call in progress, with a score that is none."""
        for key in range(1, 1000):
            self._send({"id": key, "seconds": 0.1, "entries": [{"score": "1e999", "values": {}}]})
        time.sleep(3600)

    def announce_a_giant(self):
        self._sockets()[0].sendall(b"\xf0\x00\x00\x00")
        time.sleep(3600)

    def break_json(self):
        json.dumps = None

    # Raises.
    def raise_value_error(self):
        raise ValueError("cannot parse 7")

    def raise_unprintable(self):
        raise Unprintable

    def raise_memory_error(self):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        bytearray(1 << 40)

    def recurse(self):
        self.recurse()

    def raise_system_exit(self):
        sys.exit("enough")

    def raise_keyboard_interrupt(self):
        raise KeyboardInterrupt

    def raise_base_exception(self):
        raise Judgement("too slow")

    # Returns what is no list of scores.
    def return_none_at_all(self):
        return 1.0

    def return_text(self):
        return "1.0"

    def return_too_few(self):
        return []

    def return_a_liar(self):
        return Liar([1.0])

    def return_generator(self):
        return (1.0 for _ in range(3))

    # Returns, and leaves something behind.
    def print_much(self):
        for _ in range(3000):
            print("x" * 100_000)

    def leave_daemon(self):
        daemon()

    def leave_file(self):
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"x" * 1000)

    def leave_port(self):
        if os.fork() == 0:
            os.setsid()
            with socket.create_server(("127.0.0.1", 0)):
                time.sleep(3600)

    def _sockets(self):
        found = []
        for fd in range(3, 100):
            with contextlib.suppress(OSError):
                found.append(socket.socket(fileno=fd))
        return found

    def _send(self, message):
        body = json.dumps(message).encode()
        self._sockets()[0].sendall(len(body).to_bytes(4, "big") + body)


def daemon():
    """A process that left its session and its parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(3600)
    os.wait()


def hold(size):
    hoard = b"x" * size
    time.sleep(3600)
    del hoard
