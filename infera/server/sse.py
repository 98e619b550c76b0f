"""Splits an engine's event stream at frame boundaries without changing a byte of it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
_DECODER: Final = msgspec.json.Decoder()
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
MARK_BYTES_MAX: Final = 4


class FrameTooLargeError(Exception):
    """A frame did not end within FRAME_BYTES_MAX."""


class FrameSplitter:
    """Feed it what arrives; it returns the frames that are whole, each with the blank line that ends it."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._rest = b""
        self._frame_bytes_max = frame_bytes_max

    def feed(self, chunk: bytes) -> list[bytes]:
        """Whole frames, in order. Raises FrameTooLargeError."""
        # A mark may begin in what is left over; what lies before that was searched already.
        search = max(0, len(self._rest) - MARK_BYTES_MAX + 1)
        data = self._rest + chunk if self._rest else chunk
        marks = _ENDS if b"\r" in data else _ENDS[:1]
        frames: list[bytes] = []
        start = 0
        while (end := _frame_end(data, max(start, search), marks)) > 0:
            frames.append(data[start:end])
            start = end
        self._rest = data[start:]
        if len(self._rest) > self._frame_bytes_max:
            raise FrameTooLargeError(f"an event of more than {self._frame_bytes_max} bytes")
        return frames

    def rest(self) -> bytes:
        """What came after the last whole frame."""
        return self._rest


def _frame_end(data: bytes, start: int, marks: tuple[bytes, ...]) -> int:
    found = [place + len(mark) for mark in marks if (place := data.find(mark, start)) >= 0]
    return min(found, default=0)


def data_of(frame: bytes) -> bytes | None:
    """The data of a frame, None for comments and frames without any."""
    if frame.startswith(b"data:") and frame.count(b"\n") <= 2 and b"\r" not in frame:
        return frame[5:].strip()
    lines = [line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def json_of(data: bytes) -> dict[str, Any] | None:
    """The object in a frame's data; None when it is something else."""
    try:
        content = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return content if isinstance(content, dict) else None


def error_of(data: bytes) -> dict[str, Any] | None:
    """The whole error object when the data is an error and nothing else."""
    if b'"error"' not in data and b'"object":"error"' not in data:
        return None
    content = json_of(data)
    if content is None or content.get("choices"):
        return None
    return content if content.get("error") or content.get("object") == "error" else None


def usage_of(data: bytes) -> dict[str, Any] | None:
    """The object of a frame that only reports usage, as engines send last when asked to."""
    if b'"usage"' not in data or b'"choices"' not in data:
        return None
    content = json_of(data)
    if content is None or content.get("choices") != [] or not isinstance(content.get("usage"), dict):
        return None
    return content
