"""The client of servers: a loop that goes on, and memory that is let go only when nobody copies any more."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvd.client import aio
from kvd.client.aio import AsyncKvdClient, BusyError
from kvd.client.copier import CpuCopier, Segment
from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import SPEC, key_of

pytestmark = pytest.mark.integration
SIZE = SPEC.shard_bytes[0]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    yield from running()


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncKvdClient]:
    made = AsyncKvdClient(daemon.socket, "aio", [SPEC], saves_shard=0)
    await made.start()
    assert made.is_connected
    yield made
    await made.close()


async def until_present(client: AsyncKvdClient, keys: bytes) -> None:
    """A put from stock is in the index a moment later."""
    async with asyncio.timeout(20):
        while client.probe_run(SPEC, keys) < len(keys) // 16:
            await asyncio.sleep(0.005)


async def test_what_is_put_can_be_got(client: AsyncKvdClient) -> None:
    content = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)
    assert await client.put_buffer(SPEC, key_of(1), content)
    await until_present(client, key_of(1))
    out = bytearray(SIZE)
    assert await client.get_buffer(SPEC, key_of(1), out)
    assert out == content
    assert not await client.get_buffer(SPEC, key_of(2), out)


async def test_batches_and_pins(client: AsyncKvdClient) -> None:
    memory = ctypes.create_string_buffer(8 * SIZE)
    copier = CpuCopier([Segment(ctypes.addressof(memory), SIZE, SIZE)])
    ctypes.memset(memory, 7, 4 * SIZE)
    keys = b"".join(key_of(number) for number in range(10, 14))
    assert await client.put(SPEC, 0, keys, [1, 2, 3, 4], copier, [0, 1, 2, 3]) == 4
    await until_present(client, keys)
    async with client.pinned(SPEC, keys + key_of(99)) as run:
        assert run is not None
        assert len(run.slots) == 4
        assert await client.load(run, 0, copier, [4, 5, 6, 7]) == 4
        arena = run.arena
        assert arena.pins_held() == 4
    assert arena.pins_held() == 0
    assert memory.raw[4 * SIZE : 8 * SIZE] == bytes([7]) * (4 * SIZE)
    async with client.pinned(SPEC, key_of(99)) as nothing:
        assert nothing is None


async def test_pins_are_given_back_when_cancelled(client: AsyncKvdClient) -> None:
    assert await client.put_buffer(SPEC, key_of(3), bytes(SIZE))
    await until_present(client, key_of(3))
    started = asyncio.Event()

    async def hold() -> None:
        async with client.pinned(SPEC, key_of(3)) as run:
            assert run is not None
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with client.pinned(SPEC, key_of(3)) as run:
        assert run is not None
        assert run.arena.pins_held() == 1


async def test_a_cancelled_call_returns_only_when_its_work_has_ended(client: AsyncKvdClient) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(20)
        ended.set()

    task = asyncio.create_task(client._do(work))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert client._waiting == 0


async def test_a_call_cancelled_before_its_turn_is_not_done(client: AsyncKvdClient) -> None:
    go_on, done = threading.Event(), []
    first = asyncio.create_task(client._do(lambda: go_on.wait(20)))
    second = asyncio.create_task(client._do(lambda: done.append(1)))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not done


async def test_too_many_calls_are_refused(client: AsyncKvdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "WAITING_MAX", 2)
    go_on = threading.Event()
    tasks = [asyncio.create_task(client._do(lambda: go_on.wait(20))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(BusyError, match="under way already"):
        await client.put_buffer(SPEC, key_of(5), bytes(SIZE))
    go_on.set()
    assert await asyncio.gather(*tasks) == [True, True]
    assert await client._do(lambda: 5) == 5


async def test_errors_come_back(client: AsyncKvdClient) -> None:
    with pytest.raises(ValueError, match="a shard of this kind has"):
        await client.put_buffer(SPEC, key_of(6), b"short")


async def test_the_loop_goes_on_while_the_daemon_is_stopped(daemon: DaemonProcess, client: AsyncKvdClient) -> None:
    assert daemon.popen is not None
    threads = Path(f"/proc/{daemon.popen.pid}/task")
    daemon.send(signal.SIGSTOP)
    try:
        while not all(" T " in (thread / "stat").read_text() for thread in threads.iterdir()):
            await asyncio.sleep(0.005)
        task = asyncio.create_task(client._do(lambda: client._client.reserve(SPEC, 0, [key_of(70)], [1])))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert turns > 10
        assert task.result() == []
    finally:
        daemon.send(signal.SIGCONT)


async def test_without_a_daemon_everything_is_a_miss(daemon: DaemonProcess) -> None:
    client = AsyncKvdClient(daemon.socket.with_name("nobody"), "aio", [SPEC])
    await client.start()
    assert not client.is_connected
    assert client.probe_run(SPEC, key_of(1)) == 0
    assert not await client.put_buffer(SPEC, key_of(1), bytes(SIZE))
    assert not await client.get_buffer(SPEC, key_of(1), bytearray(SIZE))
    await client.close()
    await client.close()
    with pytest.raises(BusyError, match="closed"):
        await client.put_buffer(SPEC, key_of(1), bytes(SIZE))
