"""Frames between a grader process and its parent: a length, then JSON.

JSON because a grader may have run hostile code in its process: what comes back is data of known types and bounded
length, never an object that runs code when it is read. A frame that breaks the rules raises `ProtocolError`, on which
the parent kills the sender.
"""

import asyncio
import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("!I")
# Far above what `scores.py` lets a call of hundreds of samples return.
MAX_REPLY_BYTES = 16 << 20

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other end sent something that is not a frame."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"what is no object: {body[:80]!r}")
    return message


def send(sock: socket.socket, message: Message) -> None:
    sock.sendall(encode(message))


def receive(sock: socket.socket) -> Message | None:
    """The next frame from a blocking socket, None at its end. Takes no byte past it: file descriptors may follow."""
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


async def read(reader: asyncio.StreamReader, max_bytes: int) -> Message | None:
    """The next frame from a stream, None at its end."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > max_bytes:
            raise ProtocolError(f"a frame of {size} bytes, more than {max_bytes}")
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
