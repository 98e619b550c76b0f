"""What a server and the ingest process say to each other over a Unix socket.

The socket is an abstract one: nothing is left in a file system when a process is killed. The first thing the
ingest process sends is ``HELLO`` with the descriptors of the map's memory and of the load table's beside it; then both
sides send messages, each a length of four bytes (little-endian) and MessagePack.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

import msgspec

HELLO: Final = b"infera cachemap 2"
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""A side that lets this much pile up is not reading any more."""

_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Follow a worker, or follow it as this record says from now on. ``record`` is JSON."""

    record: bytes


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Follow a worker no longer."""

    incarnation: str


class Predict(msgspec.Struct, frozen=True, tag="predict"):
    """A request was just sent to where ``holder`` is; ``keys`` are those of its blocks, 16 bytes each."""

    holder: int
    keys: bytes


class Holders(msgspec.Struct, frozen=True, tag="holders"):
    """Where a worker's blocks are entered."""

    incarnation: str
    ranks: dict[int, int]
    shared: tuple[int, ...]


class Problems(msgspec.Struct, frozen=True, tag="problems"):
    """What is not followed, in words; all of it."""

    lines: tuple[str, ...]


class Lane(msgspec.Struct, frozen=True, tag="lane"):
    """The server's own lane of the load table; the first message it gets. None: all are taken."""

    number: int | None


ToIngest = Add | Remove | Predict
ToServer = Holders | Problems | Lane
_ENCODER: Final = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The other side is gone, does not read, or says what cannot be understood."""


def encode(message: ToIngest | ToServer) -> bytes:
    """A message with its length. Raises WireError when it is longer than the limit."""
    body = _ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {len(body)} bytes; {MESSAGE_BYTES_MAX} are the limit")
    return _LENGTH.pack(len(body)) + body


def send(writer: asyncio.StreamWriter, message: ToIngest | ToServer) -> None:
    """Send without waiting. Raises WireError when the other side does not read."""
    if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
        raise WireError("the other side does not read")
    writer.write(encode(message))


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next message's body. Raises WireError at the end."""
    try:
        (count,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if count > MESSAGE_BYTES_MAX:
            raise WireError(f"a message of {count} bytes; {MESSAGE_BYTES_MAX} are the limit")
        return await reader.readexactly(count)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise WireError("the connection ended") from error


def address(name: str) -> str:
    """The abstract socket's address."""
    return f"\0infera-cachemap-{name}"


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
