"""kvd's blocks in the map: snapshot, live changes, gaps, a daemon that goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import zmq
import zmq.asyncio
from infera_core.keys import chain_keys, root_key

from infera.cachemap.fleet_cache import FleetCache
from infera.discovery.record import KvdSource, WorkerRecord
from tests.support.records import record

pytestmark = pytest.mark.integration
TOKENS = list(range(160))
KEYS = [chain_keys(root_key(), TOKENS)[place : place + 16] for place in range(0, 160, 16)]
END = (2**64 - 1).to_bytes(8, "big")


class Kvd:
    """What kvd says over its two sockets, written down from the contract."""

    def __init__(self, folder: Path, instance: str = "0a") -> None:
        self.pub_endpoint, self.snapshot_endpoint = f"ipc://{folder}/pub", f"ipc://{folder}/snap"
        self.topic = f"kvd@{instance}".encode()
        self.instance = instance
        self.held: set[bytes] = set()
        self.sequence = 0
        self.snapshots = 0

    async def start(self) -> None:
        """Listen."""
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(self.pub_endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.snapshot_endpoint)
        self._task = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        """Go away."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def say(self, kind: str, *keys: bytes, lose: bool = False, namespace: str = "aa") -> None:
        """Store or remove records."""
        if namespace == "aa":
            (self.held.update if kind == "stored" else self.held.difference_update)(keys)
        self.sequence += 1
        if not lose:
            payload = self._payload(kind, namespace, keys)
            await self._pub.send_multipart([self.topic, self.sequence.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            client, _, question = await self._router.recv_multipart()
            assert question == b"snapshot"
            self.snapshots += 1
            sequence = self.sequence.to_bytes(8, "big")
            for key in sorted(self.held):
                payload = self._payload("stored", "aa", (key,))
                await self._router.send_multipart([client, b"", self.topic, sequence, payload])
            await self._router.send_multipart([client, b"", self.topic, END, b""])

    @staticmethod
    def _payload(kind: str, namespace: str, keys: tuple[bytes, ...]) -> bytes:
        event = {"type": kind, "tier": "ram", "namespace": namespace, "model": "m", "group": 0, "keys": b"".join(keys)}
        return msgspec.msgpack.encode({"ts": 0.0, "events": [event]})

    def source(self, namespace: str = "aa") -> KvdSource:
        """How a worker names it."""
        return KvdSource(
            instance=self.instance, namespace=namespace, pub=self.pub_endpoint, snapshot=self.snapshot_endpoint
        )


@pytest.fixture
async def kvd() -> AsyncIterator[Kvd]:
    with TemporaryDirectory(prefix="infera-") as folder:
        made = Kvd(Path(folder))
        await made.start()
        yield made
        await made.stop()


@pytest.fixture
async def cache() -> AsyncIterator[FleetCache]:
    made = FleetCache()
    yield made
    await made.close()


def hit(cache: FleetCache, worker: WorkerRecord) -> int:
    target = cache.target(worker, 0)
    assert target is not None
    return cache.match(b"".join(KEYS), [target])[0].total_tokens


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_snapshot_then_changes_for_every_worker_that_names_it(kvd: Kvd, cache: FleetCache) -> None:
    await kvd.say("stored", *KEYS[:4])
    readers = [record(number, events=None, kvd=kvd.source()) for number in (1, 2)]
    stranger = record(3, events=None, kvd=kvd.source("bb"))
    for worker in (*readers, stranger):
        cache.add_worker(worker)
    await until(lambda: all(hit(cache, worker) == 64 for worker in readers))
    await kvd.say("stored", *KEYS[4:6])
    await kvd.say("stored", *KEYS[:10], namespace="cc")
    await until(lambda: hit(cache, readers[0]) == 96)
    await kvd.say("removed", KEYS[1])
    await until(lambda: all(hit(cache, worker) == 16 for worker in readers))
    assert hit(cache, stranger) == 0
    for worker in readers:
        cache.remove_worker(worker)
    assert cache.entry_count == 0


async def test_a_gap_brings_a_new_snapshot_and_no_ghost(kvd: Kvd, cache: FleetCache) -> None:
    await kvd.say("stored", *KEYS[:4])
    worker = record(1, events=None, kvd=kvd.source())
    cache.add_worker(worker)
    await until(lambda: hit(cache, worker) == 64)
    await kvd.say("removed", KEYS[2], lose=True)
    await kvd.say("stored", KEYS[9])
    await until(lambda: hit(cache, worker) == 32)
    assert cache.counters("kvd")["gap"] == 1


async def test_when_kvd_goes_away_its_blocks_go_and_come_back_with_it(kvd: Kvd, cache: FleetCache) -> None:
    await kvd.say("stored", *KEYS[:4])
    worker = record(1, events=None, kvd=kvd.source())
    cache.add_worker(worker)
    await until(lambda: hit(cache, worker) == 64)
    await kvd.stop()
    await until(lambda: hit(cache, worker) == 0)
    assert cache.problems()
    await kvd.start()
    await until(lambda: hit(cache, worker) == 64)
    assert not cache.problems()


async def test_a_worker_that_changes_its_kvd_reads_only_the_new_one(kvd: Kvd, cache: FleetCache) -> None:
    await kvd.say("stored", *KEYS[:4])
    old = record(1, kvd=kvd.source())
    cache.add_worker(old)
    await until(lambda: hit(cache, old) == 64)
    ranks = cache.ingest.directory[old.incarnation].ranks
    new = record(1, kvd=kvd.source("bb"))
    cache.change_worker(old, new)
    await until(lambda: not cache.problems())
    assert hit(cache, new) == 0
    assert cache.ingest.directory[new.incarnation].ranks == ranks, "the engine's own entries are kept"
    cache.remove_worker(new)
    assert cache.entry_count == 0


async def test_mooncake_1548_announced_removals_are_followed(kvd: Kvd, cache: FleetCache) -> None:
    """Mooncake#1548, LMCache#5076: removals were not announced; here one that is must take effect at once."""
    worker = record(1, events=None, kvd=kvd.source())
    cache.add_worker(worker)
    await until(lambda: not cache.problems())
    for _ in range(20):
        await kvd.say("stored", *KEYS)
        await kvd.say("stored", *KEYS)
        await kvd.say("removed", *KEYS)
    await kvd.say("stored", KEYS[0])
    await until(lambda: hit(cache, worker) == 16)
    assert cache.entry_count == 1
