"""What travels on kvd's socket.

A frame is a 16-byte little-endian header and a payload of at most `FRAME_BYTES_MAX`:

    u32 payload bytes | u16 message type | u16 kind | u32 request id | u32 magic "IKVD"

`kind` is request, answer or error. Answers carry the id of their request and may be pipelined; an
error's payload is UTF-8 text. HELLO, OPEN, STATUS, DROP, LIST and RETAIN carry JSON; the hot messages RESERVE,
COMMIT, GIVE_UP and TOUCH carry packed arrays of the structs in `csrc/store.h`, so that the daemon
hands them to C as they are.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 1 << 20
HEADER = struct.Struct("<IHHII")
MAGIC = int.from_bytes(b"IKVD", "little")

WISH = struct.Struct("<16sII")
GRANT = struct.Struct("<QQII")
COMMITMENT = struct.Struct("<QQ")
STATUS_CODE = struct.Struct("<I")
RESERVE_HEAD = struct.Struct("<IHHQII")
"""class id, shard, retention class, tenant tag, seconds to live (0: no limit), 0; then wishes."""
TOUCH_HEAD = struct.Struct("<I")
"""class id; then 16-byte keys."""
VERIFY_BATCH_MAX = 64
"""Records of one VERIFY: the daemon reads them whole."""
LIST_RECORDS_MAX = 1000
"""Records of one LIST answer, which then fits a frame."""
BATCH_MAX = 16384
"""Entries of one RESERVE, COMMIT, GIVE_UP or TOUCH."""


class Message(IntEnum):
    """Message types."""

    HELLO = 1
    OPEN = 2
    RESERVE = 3
    COMMIT = 4
    GIVE_UP = 5
    TOUCH = 6
    STATUS = 7
    DROP = 8
    BYE = 9
    VERIFY = 10
    LIST = 11
    RETAIN = 12


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 0
    ANSWER = 1
    ERROR = 2


class ProtocolError(Exception):
    """The bytes received are not this protocol; the connection cannot go on."""


class RefusedError(Exception):
    """The peer understood the request and refused it in words."""


@dataclass(frozen=True)
class Frame:
    """One decoded frame."""

    message: int
    kind: int
    request_id: int
    payload: bytes


def encode(message: int, kind: Kind, request_id: int, payload: bytes) -> bytes:
    """Return the frame's bytes.

    Raises:
        ValueError: when the payload is larger than a frame may be.
    """
    if len(payload) > FRAME_BYTES_MAX:
        raise ValueError(f"payload of {len(payload)} bytes; a frame carries at most {FRAME_BYTES_MAX}")
    return HEADER.pack(len(payload), message, kind, request_id, MAGIC) + payload


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    def rest(self) -> bytes:
        """Return what was fed but is not part of a frame taken out, for another reader to go on with."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    @property
    def is_within_frame(self) -> bool:
        """Whether a part of a frame is here and the rest is not."""
        return bool(self._buffer)

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None until more arrives.

        Raises:
            ProtocolError: on a wrong magic number or a length over the limit.
        """
        if len(self._buffer) < HEADER.size:
            return None
        size, message, kind, request_id, magic = HEADER.unpack_from(self._buffer)
        if magic != MAGIC:
            raise ProtocolError("not the kvd protocol (wrong magic number)")
        if size > FRAME_BYTES_MAX:
            raise ProtocolError(f"frame of {size} bytes; at most {FRAME_BYTES_MAX} are accepted")
        end = HEADER.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return Frame(message, kind, request_id, payload)


def encode_json(value: dict[str, Any]) -> bytes:
    """Return a JSON payload."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_json(payload: bytes) -> dict[str, Any]:
    """Return the JSON object of a payload.

    Raises:
        ProtocolError: when it is not one.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"payload is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError("payload is not a JSON object")
    return value
