"""The client for servers that run an event loop.

The synchronous client does the work in one thread of its own, so the loop never waits for memory or
for the daemon. Look-ups are answered at once: they take microseconds and no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from kvd.client import arrays
from kvd.client.client import KvdClient, PinnedRun, RecordSpec
from kvd.client.copier import CpuCopier

WAITING_MAX = 256
"""Calls begun and not finished; more are refused, so that a slow daemon cannot pile up memory."""

T = TypeVar("T")


class BusyError(Exception):
    """More calls are under way than are allowed; try again later, or treat it as a miss."""


class AsyncKvdClient:
    """`KvdClient` with coroutines. From one event loop.

    Cancelling a call stops the waiting, not the work: bytes may still be read from or written to the
    caller's memory until it ends, so the call itself waits for that before it lets the cancellation on.
    """

    def __init__(
        self, socket_path: Path, name: str, specs: Sequence[RecordSpec], saves_shard: int | None = None
    ) -> None:
        self._client = KvdClient(socket_path, name, specs, saves_shard)
        self._thread = ThreadPoolExecutor(1, "infera-kvd-aio")
        self._waiting = 0
        self._is_closed = False

    async def start(self) -> None:
        """Connect once now; without a daemon everything is a miss until there is one."""
        await self._do(self._client.start)

    @property
    def is_connected(self) -> bool:
        """Whether a daemon is there."""
        return self._client.session() is not None

    def probe_run(self, spec: RecordSpec, keys: bytes) -> int:
        """Number of leading keys present with all shards. Does not wait, hence no coroutine."""
        return self._client.probe_run(spec, keys)

    def touch(self, spec: RecordSpec, keys: bytes) -> int:
        """See `KvdClient.touch`. Does not wait, hence no coroutine."""
        return self._client.touch(spec, keys)

    @asynccontextmanager
    async def pinned(self, spec: RecordSpec, keys: bytes) -> AsyncIterator[PinnedRun | None]:
        """The leading records that are present, pinned inside the `async with`; None for none."""
        run = self._client.pin_run(spec, keys)
        try:
            yield run
        finally:
            if run is not None:
                run.release()

    async def put(
        self, spec: RecordSpec, shard: int, keys: bytes, depths_grains: Sequence[int], copier: CpuCopier,
        block_ids: Sequence[int],
    ) -> int:  # fmt: skip
        """Save one shard of each record; returns how many were saved.

        Raises:
            BusyError: with too many calls under way.
        """
        return await self._do(lambda: self._client.put(spec, shard, keys, depths_grains, copier, block_ids))

    async def load(self, run: PinnedRun, shard: int, copier: CpuCopier, block_ids: Sequence[int]) -> int:
        """Copy the records of a pinned run into blocks; returns how many leading ones arrived and were right.

        Raises:
            BusyError: with too many calls under way.
        """
        return await self._do(lambda: _load(run, shard, copier, block_ids))

    async def put_buffer(self, spec: RecordSpec, key: bytes, buffer: object, *, shard: int = 0) -> bool:
        """See `kvd.client.arrays.put_buffer`."""
        return await self._do(lambda: arrays.put_buffer(self._client, spec, key, buffer, shard=shard))

    async def get_buffer(self, spec: RecordSpec, key: bytes, buffer: object, *, shard: int = 0) -> bool:
        """See `kvd.client.arrays.get_buffer`."""
        return await self._do(lambda: arrays.get_buffer(self._client, spec, key, buffer, shard=shard))

    async def close(self) -> None:
        """Finish what was begun and leave. More calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await _until_done(asyncio.get_running_loop().run_in_executor(self._thread, self._client.close))
        self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[], T]) -> T:
        if self._is_closed:
            raise BusyError("this client is closed")
        if self._waiting >= WAITING_MAX:
            raise BusyError(f"{WAITING_MAX} calls to infera-kvd are under way already")
        self._waiting += 1
        is_wanted = threading.Event()
        is_wanted.set()
        try:
            future = asyncio.get_running_loop().run_in_executor(self._thread, _unless_given_up, work, is_wanted)
            return await _until_done(future, is_wanted)
        finally:
            self._waiting -= 1


class _GivenUpError(Exception):
    """Nobody waits for the call any more, and it has not begun."""


def _unless_given_up(work: Callable[[], T], is_wanted: threading.Event) -> T:
    if not is_wanted.is_set():
        raise _GivenUpError
    return work()


async def _until_done(future: asyncio.Future[T], is_wanted: threading.Event | None = None) -> T:
    """Wait for `future` also when cancelled meanwhile; the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            if is_wanted is not None:
                is_wanted.clear()
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # looked at, so that nobody complains about it
        raise cancelled
    return future.result()


def _load(run: PinnedRun, shard: int, copier: CpuCopier, block_ids: Sequence[int]) -> int:
    places = []
    for slot in run.slots[: len(block_ids)]:
        place = run.arena.locate(slot, shard)
        if place is None or place.size_bytes < copier.object_bytes:
            break
        places.append(place)
    addresses = [run.arena.data_address + place.offset_bytes for place in places]
    sums = copier.load(list(block_ids)[: len(places)], addresses)
    right = [got == place.checksum for got, place in zip(sums, places, strict=True)]
    return right.index(False) if False in right else len(right)
