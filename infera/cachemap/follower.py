"""Follows the events of workers and kvds as they come and go, and enters them in one map."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import zmq.asyncio

from infera.cachemap.engine_feed import EngineFeed
from infera.cachemap.interface import WorkerHolders
from infera.cachemap.kvd_feed import KvdFeed
from infera.cachemap.native_map import ENTRY_LIMIT_DEFAULT, EngineDecoder, NativeCacheMap
from infera.discovery.record import KvdSource, WorkerRecord

TICK_S: Final = 0.25
SWEEP_PAUSE_S: Final = 0.005
_NOBODY: Final = WorkerHolders()
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    holder: int
    decoder: EngineDecoder
    task: asyncio.Task[None] | None


@dataclass(slots=True)
class _Kvd:
    feed: KvdFeed
    task: asyncio.Task[None]
    # Namespace -> incarnations that read it.
    readers: dict[str, set[str]] = field(default_factory=dict)


class Follower:
    """The writer's side of the map. Every method but ``close`` is synchronous and runs on the event loop.

    ``on_change`` is called with the incarnation whenever the holders of a worker are others.
    """

    def __init__(
        self, entry_limit: int = ENTRY_LIMIT_DEFAULT, on_change: Callable[[str], None] = lambda incarnation: None
    ) -> None:
        self.map = NativeCacheMap(entry_limit)
        self._on_change = on_change
        self._context: zmq.asyncio.Context | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._ranks: dict[str, dict[int, _Rank]] = {}
        self._kvds: dict[str, _Kvd] = {}
        self._kvd_of: dict[str, KvdSource] = {}

    def start(self) -> None:
        """Begin to tick; the first worker does so too."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="sweeping of the cache map")
            self._ticking.add_done_callback(_report)

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""
        self._add_ranks(record)
        if record.kvd is not None:
            self._add_reader(record.kvd, record.incarnation)
        self._on_change(record.incarnation)

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest: a restarted kvd must not cost every engine's entries."""
        if (old.events, old.block_size_tokens) != (new.events, new.block_size_tokens):
            self._remove_ranks(old)
            self._add_ranks(new)
        elif old.adapters != new.adapters:
            for known in self._ranks.get(new.incarnation, {}).values():
                known.decoder.set_adapters(_adapters(new))
        if old.kvd != new.kvd:
            if old.kvd is not None:
                self._remove_reader(old.kvd, old.incarnation)
            if new.kvd is not None:
                self._add_reader(new.kvd, new.incarnation)
        self._on_change(new.incarnation)

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held, and its kvd when nobody else reads it."""
        self._remove_ranks(record)
        if record.kvd is not None:
            self._remove_reader(record.kvd, record.incarnation)
        self._on_change(record.incarnation)

    def holders(self, incarnation: str) -> WorkerHolders:
        """Where a worker's blocks are entered."""
        ranks = {rank: entry.holder for rank, entry in self._ranks.get(incarnation, {}).items()}
        source = self._kvd_of.get(incarnation)
        kvd = self._kvds.get(source.instance) if source else None
        shared = (kvd.feed.add_namespace(source.namespace),) if kvd and source else ()
        return WorkerHolders(ranks, shared) if ranks or shared else _NOBODY

    def problems(self) -> list[str]:
        """What is not followed, in words."""
        return [
            f"the events of kvd {instance} cannot be followed: its blocks are not seen"
            for instance, kvd in self._kvds.items()
            if not kvd.feed.is_in_step
        ]

    async def close(self) -> None:
        """Stop following everything."""
        tasks = [rank.task for ranks in self._ranks.values() for rank in ranks.values() if rank.task]
        tasks += [kvd.task for kvd in self._kvds.values()]
        tasks += [self._ticking] if self._ticking else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ranks in self._ranks.values():
            for rank in ranks.values():
                rank.decoder.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self.map.close()

    def _add_ranks(self, record: WorkerRecord) -> None:
        if record.events is None:
            return
        ranks = self._ranks.setdefault(record.incarnation, {})
        for rank in record.events.ranks:
            name = f"{record.worker_id} rank {rank.dp_rank}"
            try:
                holder = self.map.add_holder(name)
            except ValueError as error:
                _log.warning("cachemap: %s; its blocks are not seen", error)
                self.map.count("engine", "refused_full")
                continue
            decoder = EngineDecoder(self.map, holder, engine=record.engine, adapters=_adapters(record))
            feed = EngineFeed(self._zmq(), record.events.topic, rank, decoder, self.map)
            ranks[rank.dp_rank] = _Rank(holder, decoder, self._start(feed.run(), record.worker_id))

    def _remove_ranks(self, record: WorkerRecord) -> None:
        for rank in self._ranks.pop(record.incarnation, {}).values():
            if rank.task:
                rank.task.cancel()
            # Nothing runs between here and the task's end: it is cancelled where it waits.
            rank.decoder.close()
            self.map.drop_holder(rank.holder)

    def _add_reader(self, source: KvdSource, incarnation: str) -> None:
        if source.pub is None or source.snapshot is None:
            return
        kvd = self._kvds.get(source.instance)
        if kvd is None:
            feed = KvdFeed(self._zmq(), source.instance, source.pub, source.snapshot, self.map)
            kvd = self._kvds[source.instance] = _Kvd(feed, self._start(feed.run(), f"kvd {source.instance}"))
        try:
            kvd.feed.add_namespace(source.namespace)
        except ValueError as error:
            _log.warning("cachemap: kvd %s: %s; its blocks are not seen for this worker", source.instance, error)
            return
        kvd.readers.setdefault(source.namespace, set()).add(incarnation)
        self._kvd_of[incarnation] = source

    def _remove_reader(self, source: KvdSource, incarnation: str) -> None:
        self._kvd_of.pop(incarnation, None)
        kvd = self._kvds.get(source.instance)
        readers = kvd.readers.get(source.namespace) if kvd else None
        if kvd is None or readers is None:
            return
        readers.discard(incarnation)
        if not readers:
            del kvd.readers[source.namespace]
            kvd.feed.drop_namespace(source.namespace)
        if not kvd.readers:
            kvd.task.cancel()
            del self._kvds[source.instance]

    def _zmq(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context(io_threads=1)
        return self._context

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.start()
        task = asyncio.create_task(work, name=f"events of {name}")
        task.add_done_callback(_report)
        return task

    async def _tick(self) -> None:
        while True:
            is_sweeping = self.map.tick(now_ms())
            await asyncio.sleep(SWEEP_PAUSE_S if is_sweeping else TICK_S)


def _adapters(record: WorkerRecord) -> dict[str, bytes]:
    """Digests of the adapters whose content is known; the others' blocks are counted and left out."""
    return {name: bytes.fromhex(digest) for name, digest in record.adapters.items() if digest}


def now_ms() -> int:
    """The clock of predictions and of the map's heartbeat, the same in every process of a host."""
    return time.monotonic_ns() // 1_000_000


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("cachemap: %s stopped: %r", task.get_name(), task.exception())
