"""Frames between a grader process and its parent: a length, then JSON.

JSON because a grader may have run hostile code in its process: what comes back is data of known types and bounded
length, never an object that runs code when it is read. A frame that breaks the rules raises `ProtocolError`, on which
the parent kills the sender. Standard library only, as everything that a grader process imports before its graders.
"""

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct("!I")
MAX_REPLY_BYTES = 64 << 20


class ProtocolError(Exception):
    """The other end sent something that is not a frame."""


def encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not an object: {body[:80]!r}")
    return message


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(encode(message))


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next frame from a blocking socket, None at its end. Takes no byte past the frame (file descriptors may follow)."""
    header = _exactly(sock, HEADER.size)
    if header is None:
        return None
    body = _exactly(sock, HEADER.unpack(header)[0])
    return None if body is None else decode(body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


async def read(reader: "asyncio.StreamReader", limit: int = MAX_REPLY_BYTES) -> dict[str, Any] | None:
    """The next frame from a stream, None at its end."""
    from asyncio import IncompleteReadError  # only processes that run an event loop pay for its import

    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > limit:
            raise ProtocolError(f"a frame of {size} bytes, more than {limit}")
        return decode(await reader.readexactly(size))
    except (IncompleteReadError, ConnectionError):
        return None
