"""One HTTP/1.1 connection: a request out, an answer in, with backpressure both ways.

The answer's body is handed out as it arrives. When the reader is slow the socket is paused, so no more than
BUFFERED_BYTES_MAX and one read wait in memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

import httptools

from infera.transport.errors import ConnectionLostError, ProtocolError, TransportError

BUFFERED_BYTES_MAX: Final = 256 * 1024
HEADERS_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 256

Headers = Sequence[tuple[bytes, bytes]]


class HttpConnection(asyncio.Protocol):
    """Serves one request at a time. After an answer, ``is_reusable`` says whether it can serve another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._wake: asyncio.Future[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_reading_paused = False
        self.requests_sent = 0
        self.idle_since_s = 0.0
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._header_bytes = 0
        self._error: TransportError | None = None
        self._has_length = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.reason = b""
        self.has_headers = False
        self.is_complete = False
        self.bytes_received = 0
        self._keeps_alive = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer; anything after its end makes the connection useless."""
        self.bytes_received += len(data)
        if self.is_complete or self.requests_sent == 0:
            self._keeps_alive = False
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ProtocolError("the worker wants to speak another protocol"))
        except httptools.HttpParserError as error:
            self._fail(ProtocolError(f"not HTTP/1.1: {error}"))
        if not self.has_headers and self.bytes_received > 2 * HEADERS_BYTES_MAX:
            # A header that never ends reaches no callback.
            self._fail(ProtocolError(f"more than {HEADERS_BYTES_MAX} bytes of headers"))
        self._wake_reader()

    def eof_received(self) -> bool:
        """The worker will send no more."""
        if self.has_headers and not self.is_complete and not self._has_length:
            # Without a length the end of the connection is the end of the answer.
            self.is_complete = True
        self._keeps_alive = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if not self.is_complete and self._error is None:
            self._error = ConnectionLostError(str(exc) if exc else "the worker closed the connection")
        self._can_write.set()
        self._wake_reader()

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self._can_write.set()

    # httptools callbacks

    def on_status(self, status: bytes) -> None:
        """The reason phrase, perhaps in pieces."""
        self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= HEADERS_MAX or self._header_bytes > HEADERS_BYTES_MAX:
            self._fail(ProtocolError(f"more than {HEADERS_MAX} headers or {HEADERS_BYTES_MAX} bytes of them"))
            return
        lowered = name.lower()
        self.headers.append((lowered, value))
        if lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Status and headers are there; interim answers (1xx) are passed over."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            self.reason = b""
            return
        if self.status in (204, 304):
            self._has_length = True
        self.has_headers = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body, without its chunk framing."""
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > BUFFERED_BYTES_MAX and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self.has_headers:
            self.is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()

    # for the client

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent on this connection."""
        return (
            self.is_complete
            and self._keeps_alive
            and self._error is None
            and not self._chunks
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def send(self, head: bytes, body: bytes) -> None:
        """Write a request; returns when the socket has taken it. Raises ConnectionLostError."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLostError("the connection was closed before the request was sent")
        self._begin_answer()
        self.requests_sent += 1
        # One write, one segment where it fits: a small request must not wait for an acknowledgement.
        self._transport.write(head + body if len(body) <= BUFFERED_BYTES_MAX else head)
        if len(body) > BUFFERED_BYTES_MAX:
            self._transport.write(body)
        if not self._can_write.is_set():
            await self._can_write.wait()

    async def wait_for_headers(self) -> None:
        """Returns when status and headers are there. Raises TransportError."""
        while self._error is None and not self.has_headers:
            await self._wait()
        if self._error is not None and not (self.has_headers and isinstance(self._error, ConnectionLostError)):
            raise self._error

    async def next_chunk(self) -> bytes | None:
        """The next piece of the body, everything that waits in one; None at its end. Raises TransportError."""
        while not self._chunks:
            if self.is_complete:
                return None
            if self._error is not None:
                raise self._error
            await self._wait()
        chunk = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._is_reading_paused and self._transport is not None and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()
        return chunk

    def close(self) -> None:
        """Drop the connection at once, so that the worker notices and stops working."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
        self.close()

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
