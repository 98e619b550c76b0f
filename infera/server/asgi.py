"""One exchange with a client, in plain ASGI."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

from infera.server.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


class Exchange:
    """A request being answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = self.header(b"x-request-id") or ""
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.worker_id: str | None = None
        self.status = 0
        self._is_gone = False

    @property
    def has_started(self) -> bool:
        """Whether the client has a status already."""
        return self.status != 0

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def header_values(self, name: bytes) -> list[bytes]:
        """All headers of that (lower-case) name, as they came."""
        return [value for key, value in self._headers if key == name]

    async def read_body(self, size_bytes_max: int) -> bytes:
        """The whole body. Raises ApiError 413 past the limit, ClientGoneError when the client leaves."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > size_bytes_max:
            raise _too_large(size_bytes_max)
        chunks: list[bytes] = []
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size_bytes += len(chunk)
            if size_bytes > size_bytes_max:
                raise _too_large(size_bytes_max)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @asynccontextmanager
    async def until_client_leaves(self) -> AsyncIterator[None]:
        """Cancels the work inside when the client closes its connection, and raises ClientGoneError."""
        worker = asyncio.current_task()
        assert worker is not None
        watcher = asyncio.create_task(self._watch(worker))
        try:
            yield
        except asyncio.CancelledError:
            if self._is_gone and worker.uncancel() == 0:
                raise ClientGoneError from None
            raise
        finally:
            watcher.cancel()

    async def _watch(self, worker: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        worker.cancel()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers, with the request id and the worker's."""
        self.status = status
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        if self.worker_id is not None:
            headers.append((b"x-infera-worker", self.worker_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_chunk(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body; waits while the client is slow."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

    async def send_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Send a complete answer."""
        headers.append((b"content-length", str(len(body)).encode()))
        await self.start(status, headers)
        await self.send_chunk(body, is_last=True)

    async def send_error(self, error: ApiError) -> None:
        """Send an error as a complete answer."""
        await self.send_whole(error.status, error.body(), [(b"content-type", b"application/json"), *error.headers])


def _too_large(size_bytes_max: int) -> ApiError:
    return ApiError(
        413, f"the request body may have {size_bytes_max} bytes at most (--body-size-max)", code="request_too_large"
    )
