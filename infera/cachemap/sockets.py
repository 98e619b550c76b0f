"""The ZMQ sockets of this package, each with its limits."""

from __future__ import annotations

from typing import Final

import zmq
import zmq.asyncio

RECEIVE_FRAMES_MAX: Final = 10_000
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
RECONNECT_MS_MAX: Final = 5_000
# A socket with messages waiting never suspends its reader, so the reader has to let others run.
FRAMES_BEFORE_YIELD: Final = 16
END_SEQUENCE: Final = 2**64 - 1
"""The number of a message that ends a replay or a snapshot."""


def subscriber(context: zmq.asyncio.Context, endpoint: str, topic: bytes) -> zmq.asyncio.Socket:
    """A SUB socket on one topic. Reconnects by itself."""
    socket = context.socket(zmq.SUB)
    _limit(socket)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(endpoint)
    return socket


def dealer(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    """A DEALER socket for one question and its answers."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    socket.connect(endpoint)
    return socket


def read_sequence(frame: bytes) -> int | None:
    """An 8-byte big-endian sequence number; None when the frame has another size."""
    return int.from_bytes(frame, "big") if len(frame) == 8 else None


def _limit(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.RCVHWM, RECEIVE_FRAMES_MAX)
    socket.setsockopt(zmq.SNDHWM, 16)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
