"""A lean HTTP/1.1 client for talking to engines: pooled connections, deadlines, streams with backpressure.

Written for one thing: hand on what an engine sends the moment it arrives. Closing a response that is not at
its end closes the connection, which is how an engine learns that nobody wants the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

from infera.transport.errors import (
    ConnectError,
    ConnectionLostError,
    FirstByteTimeoutError,
    IdleTimeoutError,
    PoolFullError,
    ProtocolError,
)
from infera.transport.http_connection import HttpConnection

Headers = Sequence[tuple[bytes, bytes]]
IDLE_LIFETIME_S: Final = 15.0
_FORBIDDEN_IN_HEADERS: Final = (b"\r", b"\n", b"\0")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds: to connect, until status and headers are there, and between two pieces of a body."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0


@dataclass(slots=True)
class _Pool:
    idle: deque[HttpConnection] = field(default_factory=deque)
    in_use: int = 0


class HttpResponse:
    """An answer whose body may still be on its way. Use as an async context manager, or call ``close``."""

    def __init__(self, client: HttpClient, origin: str, connection: HttpConnection, idle_s: float) -> None:
        self._client = client
        self._origin = origin
        self._connection: HttpConnection | None = connection
        self._idle_s = idle_s
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    async def next_chunk(self) -> bytes | None:
        """The next piece of the body; None at its end. Raises TransportError."""
        if self._connection is None:
            return None
        try:
            async with asyncio.timeout(self._idle_s):
                chunk = await self._connection.next_chunk()
        except TimeoutError as error:
            self.close()
            raise IdleTimeoutError(f"nothing came for {self._idle_s} s") from error
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
        return chunk

    async def read(self, size_bytes_max: int) -> bytes:
        """The whole body. Raises ProtocolError when it is larger than ``size_bytes_max``, or TransportError."""
        chunks: list[bytes] = []
        size_bytes = 0
        while (chunk := await self.next_chunk()) is not None:
            size_bytes += len(chunk)
            if size_bytes > size_bytes_max:
                self.close()
                raise ProtocolError(f"the answer has more than {size_bytes_max} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Give the connection back, or drop it when the answer is not at its end. Safe to repeat."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._client._release(self._origin, connection)

    async def __aenter__(self) -> HttpResponse:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HttpClient:
    """Connections to any number of workers. Belongs to one event loop."""

    def __init__(
        self, *, connections_per_origin_max: int = 1024, idle_per_origin_max: int = 64, timeouts: Timeouts | None = None
    ) -> None:
        self._pools: dict[str, _Pool] = {}
        self._connections_max = connections_per_origin_max
        self._idle_max = idle_per_origin_max
        self.timeouts = timeouts or Timeouts()
        self.is_closed = False

    async def request(
        self,
        method: str,
        origin: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeouts: Timeouts | None = None,
    ) -> HttpResponse:
        """Send a request and return when status and headers are there.

        ``origin`` is http://host:port. Raises ConnectError, ConnectionLostError, FirstByteTimeoutError,
        ProtocolError or PoolFullError.
        """
        limits = timeouts or self.timeouts
        head = _request_head(method, origin, path, headers, len(body))
        while True:
            connection, is_reused = await self._acquire(origin, limits.connect_s)
            try:
                async with asyncio.timeout(limits.first_byte_s):
                    await connection.send(head, body)
                    await connection.wait_for_headers()
            except TimeoutError as error:
                self._release(origin, connection)
                raise FirstByteTimeoutError(f"no answer within {limits.first_byte_s} s") from error
            except ConnectionLostError:
                self._release(origin, connection)
                if is_reused and connection.bytes_received == 0:
                    # The worker closed an idle connection just as we took it; a fresh one tells how it really is.
                    continue
                raise
            except BaseException:
                self._release(origin, connection)
                raise
            return HttpResponse(self, origin, connection, limits.idle_s)

    def forget(self, origin: str) -> None:
        """Drop idle connections to a worker that is gone."""
        pool = self._pools.get(origin)
        if pool is not None:
            self._drop_idle(pool)
            if pool.in_use == 0:
                del self._pools[origin]

    def close(self) -> None:
        """Drop all idle connections; answers under way keep theirs until they are closed."""
        self.is_closed = True
        for origin in list(self._pools):
            self.forget(origin)

    def counts(self, origin: str) -> tuple[int, int]:
        """Connections in use and idle."""
        pool = self._pools.get(origin)
        return (pool.in_use, len(pool.idle)) if pool else (0, 0)

    async def _acquire(self, origin: str, connect_s: float) -> tuple[HttpConnection, bool]:
        pool = self._pools.setdefault(origin, _Pool())
        now_s = asyncio.get_running_loop().time()
        while pool.idle:
            connection = pool.idle.pop()
            if connection.is_reusable and now_s - connection.idle_since_s < IDLE_LIFETIME_S:
                pool.in_use += 1
                return connection, True
            connection.close()
        if pool.in_use >= self._connections_max:
            raise PoolFullError(f"{self._connections_max} connections to {origin} are in use")
        pool.in_use += 1
        try:
            return await _connect(origin, connect_s), False
        except BaseException:
            self._give_up_slot(origin, pool)
            raise

    def _release(self, origin: str, connection: HttpConnection) -> None:
        pool = self._pools[origin]
        if connection.is_reusable and not self.is_closed and len(pool.idle) < self._idle_max:
            connection.idle_since_s = asyncio.get_running_loop().time()
            pool.idle.append(connection)
        else:
            connection.close()
        self._give_up_slot(origin, pool)

    def _give_up_slot(self, origin: str, pool: _Pool) -> None:
        pool.in_use -= 1
        if pool.in_use == 0 and not pool.idle and self._pools.get(origin) is pool:
            del self._pools[origin]

    @staticmethod
    def _drop_idle(pool: _Pool) -> None:
        while pool.idle:
            pool.idle.pop().close()


async def _connect(origin: str, connect_s: float) -> HttpConnection:
    parts = urlsplit(origin)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ConnectError(f"{origin!r} is not http://host:port")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(connect_s):
            _, connection = await loop.create_connection(HttpConnection, parts.hostname, parts.port)
    except TimeoutError as error:
        raise ConnectError(f"{origin} did not accept within {connect_s} s") from error
    except OSError as error:
        raise ConnectError(f"{origin}: {error}") from error
    return connection


def _request_head(method: str, origin: str, path: str, headers: Headers, body_bytes: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("ascii"), b"host: " + urlsplit(origin).netloc.encode("ascii")]
    for name, value in headers:
        if any(mark in name or mark in value for mark in _FORBIDDEN_IN_HEADERS):
            raise ProtocolError("a header may not hold line breaks")
        lines.append(name + b": " + value)
    if body_bytes or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % body_bytes)
    return b"\r\n".join(lines) + b"\r\n\r\n"
