"""The caller's ends of a sandbox's pipes, served by one selector.

In: bytes for the program's standard input and its channel. Out: what it wrote, by the name of the pipe. Nothing here
blocks longer than it is told, and of standard error only the end is kept.
"""

import os
import selectors
from collections.abc import Mapping

CHUNK = 2**16
STDERR_KEPT = 4096
OUTPUTS = ("stdout", "stderr", "channel")


class Pipes:
    """Args:
    fds: file descriptors by name: "stdin", "stdout", "stderr", "control" and, both ways, "channel". They are owned.
    stdin: what the program reads, which then ends.
    """

    def __init__(self, fds: Mapping[str, int], stdin: bytes):
        self.fds = dict(fds)
        self.received = {name: bytearray() for name in (*OUTPUTS, "control")}
        self.produced = 0  # bytes received so far
        self._pending = {"stdin": bytearray(stdin), "channel": bytearray()}
        self._selector = selectors.DefaultSelector()
        for name, fd in self.fds.items():
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ, name)

    def serve(self, wait_s: float) -> None:
        """Reads and writes whatever is ready, after waiting at most so long for it."""
        for key, events in self._selector.select(max(0.0, wait_s)):
            if events & selectors.EVENT_WRITE:
                self._write(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def send(self, data: bytes) -> None:
        """Queues bytes for the channel."""
        self._pending["channel"] += data
        if "channel" in self.fds:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self.fds["channel"], events, "channel")

    def drain(self) -> None:
        """Reads what is left of the program's output, once nobody writes any more."""
        for name in OUTPUTS:
            while name in self.fds and self._read(name):
                pass

    def close(self) -> None:
        for name in list(self.fds):
            self._close(name)
        self._selector.close()

    def _read(self, name: str) -> bool:
        """Takes in what is there, up to a chunk; whether there was anything."""
        try:
            data = os.read(self.fds[name], CHUNK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self._close(name)
            return False
        self.produced += len(data)
        self.received[name] += data
        if name == "stderr":
            del self.received[name][:-STDERR_KEPT]
        return True

    def _write(self, name: str) -> None:
        pending = self._pending[name]
        try:
            del pending[: os.write(self.fds[name], pending[:CHUNK])]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # the program does not want it
            pending.clear()
        if not pending and name == "stdin":
            self._close("stdin")
        elif not pending:
            self._selector.modify(self.fds["channel"], selectors.EVENT_READ, "channel")

    def _close(self, name: str) -> None:
        fd = self.fds.pop(name)
        self._selector.unregister(fd)
        os.close(fd)
