from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infera.transport.errors import (
    ConnectError,
    ConnectionLostError,
    FirstByteTimeoutError,
    IdleTimeoutError,
    PoolFullError,
    ProtocolError,
    TransportError,
)
from infera.transport.http_client import HttpClient, Timeouts
from infera.transport.http_connection import BUFFERED_BYTES_MAX, HttpConnection
from tests.support.processes import free_port
from tests.unit.transport.conftest import Handler, RawServer, read_request

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    made = HttpClient(timeouts=Timeouts(connect_s=5, first_byte_s=5, idle_s=5))
    yield made
    made.close()


def answering(*pieces: bytes, then_close: bool = False) -> Handler:
    """A handler that answers every request with ``pieces``, letting the client read each before the next."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if then_close:
                return

    return handle


async def get(client: HttpClient, server: RawServer) -> tuple[int, bytes]:
    async with await client.request("GET", server.origin, "/x") as response:
        return response.status, await response.read(10**9)


async def test_the_request_is_what_was_asked(client: HttpClient, raw_server: RawServer) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(SHORT)

    raw_server.handler = handle
    await client.request("POST", raw_server.origin, "/v1/x", headers=[(b"x-a", b"1")], body=b"hello")
    host = raw_server.origin.removeprefix("http://").encode()
    assert seen == [(b"POST /v1/x HTTP/1.1\r\nhost: " + host + b"\r\nx-a: 1\r\ncontent-length: 5\r\n\r\n", b"hello")]


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=20), max_size=4),
    cuts=st.sets(st.integers(0, 400), max_size=30),
    extension=st.booleans(),
    trailer=st.booleans(),
)
@settings(max_examples=300)
def test_chunked_bodies_split_anywhere(bodies: list[bytes], cuts: set[int], extension: bool, trailer: bool) -> None:
    mark = b";a=b" if extension else b""
    wire = CHUNKED + b"".join(b"%x%s\r\n%s\r\n" % (len(body), mark, body) for body in bodies)
    wire += b"0\r\n" + (b"x-trailer: 1\r\n" if trailer else b"") + b"\r\n"
    assert _feed(wire, sorted(cut for cut in cuts if cut < len(wire))) == (200, b"".join(bodies), True)


def test_chunked_bodies_split_at_every_single_byte() -> None:
    wire = CHUNKED + b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    for cut in range(1, len(wire)):
        assert _feed(wire, [cut]) == (200, b"abc0123456789abcdef", True), cut
    assert _feed(wire, list(range(1, len(wire)))) == (200, b"abc0123456789abcdef", True)


@given(cut=st.integers(0, len(CHUNKED) + 9))
def test_a_truncated_answer_is_never_complete(cut: int) -> None:
    _, _, is_complete = _feed((CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n")[: cut + 1], [])
    assert not is_complete


def _feed(wire: bytes, cuts: list[int]) -> tuple[int, bytes, bool]:
    """Feed a connection by hand, as the event loop would."""

    async def run() -> tuple[int, bytes, bool]:
        connection = HttpConnection()
        connection.requests_sent = 1
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            if end > start:
                connection.data_received(wire[start:end])
        body = b"".join(connection._chunks)
        return connection.status, body, connection.is_complete

    return asyncio.run(run())


async def test_connections_are_used_again(client: HttpClient, raw_server: RawServer) -> None:
    raw_server.handler = answering(SHORT)
    for _ in range(5):
        assert await get(client, raw_server) == (200, b"ok")
    assert raw_server.connections == 1
    assert client.counts(raw_server.origin) == (0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nok",
        SHORT + b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_connections_that_cannot_go_on_are_not_kept(
    client: HttpClient, raw_server: RawServer, answer: bytes
) -> None:
    raw_server.handler = answering(answer, then_close=True)
    for _ in range(2):
        assert await get(client, raw_server) == (200, b"ok")
    assert raw_server.connections == 2


async def test_interim_answers_are_passed_over(client: HttpClient, raw_server: RawServer) -> None:
    raw_server.handler = answering(b"HTTP/1.1 100 Continue\r\n\r\n", SHORT)
    assert await get(client, raw_server) == (200, b"ok")


async def test_an_idle_connection_that_the_worker_closed_is_replaced(client: HttpClient, raw_server: RawServer) -> None:
    async def one_then_close_on_the_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SHORT)
        if raw_server.connections == 1:
            await read_request(reader)
            writer.transport.abort()

    raw_server.handler = one_then_close_on_the_second
    assert await get(client, raw_server) == (200, b"ok")
    assert await get(client, raw_server) == (200, b"ok")
    assert raw_server.connections == 2


async def test_nobody_there() -> None:
    client = HttpClient()
    with pytest.raises(ConnectError):
        await client.request("GET", f"http://127.0.0.1:{free_port()}", "/")
    assert not client._pools


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-le"])
async def test_closed_before_the_answer(client: HttpClient, raw_server: RawServer, sent: bytes) -> None:
    raw_server.handler = answering(sent, then_close=True)
    with pytest.raises(ConnectionLostError):
        await get(client, raw_server)


@pytest.mark.parametrize("sent", [CHUNKED + b"3\r\nab", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", CHUNKED])
async def test_closed_within_the_body(client: HttpClient, raw_server: RawServer, sent: bytes) -> None:
    raw_server.handler = answering(sent, then_close=True)
    response = await client.request("GET", raw_server.origin, "/")
    with pytest.raises(ConnectionLostError):
        await response.read(100)
    assert client.counts(raw_server.origin) == (0, 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_an_error(client: HttpClient, raw_server: RawServer, sent: bytes) -> None:
    raw_server.handler = answering(sent, then_close=True)
    with pytest.raises(TransportError):
        await get(client, raw_server)
    assert client.counts(raw_server.origin) == (0, 0)


async def test_deadlines(raw_server: RawServer) -> None:
    client = HttpClient(timeouts=Timeouts(first_byte_s=0.05, idle_s=0.05))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if b"/body" in head:
            writer.write(CHUNKED + b"2\r\nab\r\n")
        await reader.readexactly(1)

    raw_server.handler = silent
    with pytest.raises(FirstByteTimeoutError):
        await client.request("GET", raw_server.origin, "/head")
    response = await client.request("GET", raw_server.origin, "/body")
    assert await response.next_chunk() == b"ab"
    with pytest.raises(IdleTimeoutError):
        await response.next_chunk()
    await asyncio.wait_for(raw_server.closed_by_client.wait(), 5)
    assert client.counts(raw_server.origin) == (0, 0)


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_leaving_early_closes_the_connection(client: HttpClient, raw_server: RawServer, leave: str) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nab\r\n")
        await reader.readexactly(1)

    raw_server.handler = stream
    response = await client.request("GET", raw_server.origin, "/")
    assert await response.next_chunk() == b"ab"
    if leave == "close":
        response.close()
    else:
        reading = asyncio.create_task(response.next_chunk())
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await asyncio.wait_for(raw_server.closed_by_client.wait(), 5)
    assert client.counts(raw_server.origin) == (0, 0)


async def test_a_slow_reader_stops_the_sender(client: HttpClient, raw_server: RawServer) -> None:
    sent = 0
    total = 64 * 2**20

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        piece = b"x" * 65_536
        while sent < total:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        await reader.readexactly(1)

    raw_server.handler = flood
    response = await client.request("GET", raw_server.origin, "/")
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert sent < total / 2
    connection = response._connection
    assert connection is not None
    assert connection._buffered_bytes < BUFFERED_BYTES_MAX + 2**20
    assert len(await response.read(total)) == total


async def test_answers_are_bounded(client: HttpClient, raw_server: RawServer) -> None:
    raw_server.handler = answering(CHUNKED, b"5\r\nabcde\r\n")
    response = await client.request("GET", raw_server.origin, "/")
    with pytest.raises(ProtocolError):
        await response.read(4)
    assert client.counts(raw_server.origin) == (0, 0)


async def test_connections_to_one_worker_are_bounded(raw_server: RawServer) -> None:
    client = HttpClient(connections_per_origin_max=2)
    raw_server.handler = answering(CHUNKED, b"1\r\na\r\n")
    held = [await client.request("GET", raw_server.origin, "/") for _ in range(2)]
    with pytest.raises(PoolFullError):
        await client.request("GET", raw_server.origin, "/")
    held[0].close()
    held.append(await client.request("GET", raw_server.origin, "/"))
    for response in held:
        response.close()
    assert not client._pools


async def test_a_large_body_goes_out_whole(client: HttpClient, raw_server: RawServer) -> None:
    lengths: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lengths.append(len((await read_request(reader))[1]))
        writer.write(SHORT)

    raw_server.handler = handle
    body = b"z" * (8 * 2**20)
    async with await client.request("POST", raw_server.origin, "/", body=body) as response:
        assert await response.read(10) == b"ok"
    assert lengths == [len(body)]


async def test_headers_cannot_be_smuggled(client: HttpClient, raw_server: RawServer) -> None:
    with pytest.raises(ProtocolError):
        await client.request("GET", raw_server.origin, "/", headers=[(b"x", b"a\r\ny: b")])
