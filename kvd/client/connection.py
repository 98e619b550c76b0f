"""A synchronous connection to the daemon: one request, one answer, never a wait without end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

from kvd import protocol
from kvd.protocol import Frame, FrameReader, Kind, Message, ProtocolError, RefusedError, encode

TIMEOUT_S = 1.0
READ_BYTES = 64 * 1024
"""Below what malloc takes from the system and gives back each time."""
DESCRIPTORS_EXPECTED = 5


class UnavailableError(Exception):
    """The daemon cannot be reached, or stopped answering; the text says what helps."""


class ClientConnection:
    """A connected socket. Not thread-safe; after an UnavailableError it is closed."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self._socket = sock
        self._path = path
        self._reader = FrameReader()
        self._next_id = 1
        self._received: list[int] = []
        self._timeout_s = TIMEOUT_S

    @classmethod
    def open(cls, path: Path, timeout_s: float = TIMEOUT_S) -> ClientConnection:
        """Connect.

        Raises:
            UnavailableError: when nobody listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise UnavailableError(
                f"no infera-kvd at {path} ({error.strerror or error}); start one with: infera-kvd serve --socket {path}"
            ) from error
        # The kernel keeps the time: Python's own timeouts cost two more system calls a request.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setblocking(True)
        connection = cls(sock, path)
        connection._timeout_s = timeout_s
        return connection

    def hello(self, name: str, resume: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[int]]:
        """Introduce this process as an engine; returns what the daemon says of itself and the
        descriptors of index, data, ledger, doorbell and lock, which the caller owns.

        Raises:
            RefusedError: when versions do not fit or the daemon is full.
            UnavailableError: when it does not answer.
        """
        request = {"protocol": [protocol.PROTOCOL_VERSION], "role": "engine", "name": name, "pid": os.getpid()}
        pidfd = os.pidfd_open(os.getpid())
        try:
            answer = self.call(Message.HELLO, protocol.encode_json(request | (resume or {})), [pidfd])
        finally:
            os.close(pidfd)
        descriptors, self._received = self._received, []
        if len(descriptors) != DESCRIPTORS_EXPECTED:
            for descriptor in descriptors:
                os.close(descriptor)
            raise UnavailableError(f"infera-kvd sent {len(descriptors)} descriptors instead of {DESCRIPTORS_EXPECTED}")
        try:
            return protocol.decode_json(answer), descriptors
        except ProtocolError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def observe(self) -> dict[str, Any]:
        """Introduce this process as an observer; returns what the daemon says of itself."""
        request = {"protocol": [protocol.PROTOCOL_VERSION], "role": "observer"}
        return protocol.decode_json(self.call(Message.HELLO, protocol.encode_json(request)))

    def call(self, message: int, payload: bytes, descriptors: list[int] | None = None) -> bytes:
        """Send a request and return the answer's payload.

        Raises:
            RefusedError: when the daemon refuses, with its words.
            UnavailableError: when it is gone, or the whole answer is not there within the timeout.
            ValueError: when the payload is larger than a frame may be.
        """
        request_id, self._next_id = self._next_id, (self._next_id + 1) % 2**32
        frame = encode(message, Kind.REQUEST, request_id, payload)
        deadline_s = time.monotonic() + self._timeout_s
        try:
            with contextlib.suppress(BrokenPipeError):  # who was shown out finds the reason in what was received
                if descriptors:
                    sent = socket.send_fds(self._socket, [frame], descriptors)
                    frame = frame[sent:]
                self._socket.sendall(frame)
            answer = self._receive(request_id, deadline_s, expects_descriptors=descriptors is not None)
        except (OSError, ProtocolError) as error:
            self.close()
            raise UnavailableError(f"infera-kvd at {self._path} does not answer: {error or 'timed out'}") from error
        if answer.kind == Kind.ERROR:
            raise RefusedError(answer.payload.decode(errors="replace"))
        return answer.payload

    def _receive(self, request_id: int, deadline_s: float, *, expects_descriptors: bool) -> Frame:
        while True:
            frame = self._reader.next_frame()
            if frame and (frame.request_id == request_id or frame.kind == Kind.ERROR):
                return frame
            if frame:
                continue  # an answer to a request that was given up
            if time.monotonic() >= deadline_s:
                raise TimeoutError("timed out")
            data = self._read(expects_descriptors)
            if not data:
                raise ConnectionResetError("connection closed")
            self._reader.feed(data)

    def _read(self, expects_descriptors: bool) -> bytes:
        """What has come, once something has; waits at most the timeout for it."""
        try:
            if not expects_descriptors:
                return self._socket.recv(READ_BYTES)
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, READ_BYTES, DESCRIPTORS_EXPECTED, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        self._received.extend(descriptors)
        return data

    def has_hung_up(self) -> bool:
        """Whether the daemon has closed its end, found out without reading."""
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close the socket. Pins and reservations stay: they end with the process or with BYE."""
        self._socket.close()
        for descriptor in self._received:
            os.close(descriptor)
        self._received.clear()
