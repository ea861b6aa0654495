"""Messages between a worker and a child process: msgpack in frames with a length of four bytes in front."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

import msgspec

Message = dict[str, Any]
"""A worker sends ``do``: ``setup``, ``run``, ``stop``, ``leave``. A child answers ``is``: ``ready``, ``not_ready``,
``started``, ``returned``, ``raised``, ``stopped``, ``log``."""

_HEAD: Final = struct.Struct("!I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    body = _encode(message)
    return _HEAD.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        asyncio.IncompleteReadError, OSError: The other end has gone.
    """
    [size] = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return _decode(await reader.readexactly(size))


def receive(sock: socket.socket) -> Message | None:
    """The next message, in a thread that waits for it; None once the other end has gone."""
    head = _exactly(sock, _HEAD.size)
    body = None if head is None else _exactly(sock, _HEAD.unpack(head)[0])
    return None if body is None else _decode(body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        try:
            more = sock.recv(size - len(found))
        except OSError:
            return None
        if not more:
            return None
        found += more
    return bytes(found)
