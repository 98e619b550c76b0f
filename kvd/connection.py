"""One client's connection to the daemon: bytes in, frames out, nothing unbounded."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
from collections.abc import Callable

from kvd.protocol import Frame, FrameReader, Kind, ProtocolError, encode

READ_BYTES = 256 * 1024
DESCRIPTORS_MAX = 4
UNSENT_BYTES_MAX = 8 << 20
"""A client that lets this much pile up is not reading; it is disconnected."""


class Connection:
    """Reads frames off a non-blocking unix socket and hands them to `on_frame`.

    `on_frame(connection, frame)` runs on the event loop and answers through `send`. `on_closed` is
    called exactly once. Descriptors that arrive are kept in `received` while their frame is handled.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Connection, Frame], None],
        on_closed: Callable[[Connection], None],
        on_malformed: Callable[[Connection, ProtocolError], None],
    ) -> None:
        self.received: list[int] = []
        self._socket = sock
        self._reader = FrameReader()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_malformed = on_malformed
        self._unsent = bytearray()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, READ_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self.received.extend(descriptors)
        while len(self.received) > DESCRIPTORS_MAX:
            os.close(self.received.pop(0))
        if not data:
            self.close()
            return
        self._reader.feed(data)
        try:
            while not self._closed and (frame := self._reader.next_frame()):
                self._on_frame(self, frame)
        except ProtocolError as error:
            self._on_malformed(self, error)
            self.send(encode(0, Kind.ERROR, 0, str(error).encode()))
            self.close()
        if not self._reader.is_within_frame:
            self._close_received()  # nobody will take them now; one may be this very connection's other end

    @property
    def is_sending(self) -> bool:
        """Whether something sent has not left yet."""
        return bool(self._unsent)

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Send a frame, with descriptors attached to its first byte."""
        if self._closed:
            return
        if descriptors:
            # Only the answer to HELLO carries descriptors, when nothing can be waiting.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            try:
                sent = self._socket.sendmsg([data], [rights])
            except OSError:
                self.close()
                return
            data = data[sent:]
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self.close()
            return
        self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._writable)
        except OSError:
            self.close()

    def hand_over(self) -> tuple[int, bytes] | None:
        """Stop reading; returns a descriptor of the socket for somebody else to own, and what was read
        from it but not looked at yet; None when the peer is gone. This object is closed afterwards."""
        if self._closed:
            return None
        descriptor = fcntl.fcntl(self._socket, fcntl.F_DUPFD_CLOEXEC, 3)
        received = self._reader.rest()
        self.close()
        return descriptor, received

    def close(self) -> None:
        """Close the socket and any descriptor nobody took."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._close_received()
        self._on_closed(self)

    def _close_received(self) -> None:
        for descriptor in self.received:
            os.close(descriptor)
        self.received.clear()
