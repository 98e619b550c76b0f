"""The cache map of a whole fleet: follows workers as they come and go, and answers for all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from infera_core.keys import GRAIN_TOKENS

from infera.cachemap.engine_feed import EngineFeed
from infera.cachemap.engine_index import EngineIndex
from infera.cachemap.interface import CacheMap, Match, Target, Tier
from infera.cachemap.kvd_feed import KvdFeed
from infera.cachemap.python_map import PythonCacheMap
from infera.discovery.record import KvdSource, WorkerRecord

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    holder: int
    index: EngineIndex
    feed: EngineFeed
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Kvd:
    feed: KvdFeed
    task: asyncio.Task[None]
    # Namespace -> incarnations that read it.
    readers: dict[str, set[str]] = field(default_factory=dict)


class FleetCache:
    """Every method but ``close`` is synchronous and runs on the event loop."""

    def __init__(self, cache_map: CacheMap | None = None) -> None:
        self.map: CacheMap = cache_map if cache_map is not None else PythonCacheMap()
        self.engine_counters: Counter[str] = Counter()
        self.kvd_counters: Counter[str] = Counter()
        self._context: zmq.asyncio.Context | None = None
        self._ranks: dict[str, dict[int, _Rank]] = {}
        self._kvds: dict[str, _Kvd] = {}

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""
        self._add_ranks(record)
        if record.kvd is not None:
            self._add_reader(record.kvd, record.incarnation)

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest: a restarted kvd must not cost every engine's entries."""
        if (old.events, old.block_size_tokens) != (new.events, new.block_size_tokens):
            self._remove_ranks(old)
            self._add_ranks(new)
        if old.kvd != new.kvd:
            if old.kvd is not None:
                self._remove_reader(old.kvd, old.incarnation)
            if new.kvd is not None:
                self._add_reader(new.kvd, new.incarnation)

    def _add_ranks(self, record: WorkerRecord) -> None:
        if record.events is not None:
            ranks = self._ranks.setdefault(record.incarnation, {})
            for rank in record.events.ranks:
                holder = self.map.add_holder(f"{record.worker_id} rank {rank.dp_rank}")
                index = EngineIndex(self.map, holder, self.engine_counters)
                feed = EngineFeed(self._zmq(), record.events.topic, rank, index, self.engine_counters)
                ranks[rank.dp_rank] = _Rank(holder, index, feed, _start(feed.run(), record.worker_id))

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held, and its kvd when nobody else reads it."""
        self._remove_ranks(record)
        if record.kvd is not None:
            self._remove_reader(record.kvd, record.incarnation)

    def _remove_ranks(self, record: WorkerRecord) -> None:
        for rank in self._ranks.pop(record.incarnation, {}).values():
            rank.task.cancel()
            self.map.drop_holder(rank.holder)

    def target(self, record: WorkerRecord, dp_rank: int) -> Target | None:
        """Where to look for a worker's blocks; None when it cannot be looked up (no events and no kvd)."""
        rank = self._ranks.get(record.incarnation, {}).get(dp_rank)
        # What the engine publishes is what it does; the record is what it was configured to do.
        block_size = (rank.index.block_size_tokens if rank else None) or record.block_size_tokens
        shared = self._shared_holders(record)
        if block_size is None or block_size % GRAIN_TOKENS or (rank is None and not shared):
            return None
        return Target(block_size // GRAIN_TOKENS, rank.holder if rank else None, shared)

    def match(self, keys: bytes, targets: Sequence[Target]) -> list[Match]:
        """Longest usable prefix of one prompt for every target."""
        return self.map.match(keys, targets)

    def blocks_by_tier(self, record: WorkerRecord) -> dict[str, int]:
        """Blocks a worker can use, by tier; those of its kvd are shared with others."""
        total: Counter[str] = Counter()
        holders = [rank.holder for rank in self._ranks.get(record.incarnation, {}).values()]
        for holder in (*holders, *self._shared_holders(record)):
            for tier, count in self.map.blocks_by_tier(holder).items():
                total[Tier(tier).name.lower()] += count
        return dict(total)

    def has_seen_events(self, record: WorkerRecord) -> bool:
        """Whether any event of the worker ever came, on any of its ranks."""
        return any(rank.feed.frames_seen for rank in self._ranks.get(record.incarnation, {}).values())

    def problems(self) -> list[str]:
        """What makes predictions worse than they could be, in words."""
        found = []
        if self.map.entry_count >= self.map.entry_limit:
            found.append(f"the cache map is full with {self.map.entry_limit} entries: new blocks are not seen")
        found.extend(
            f"the events of kvd {instance} cannot be followed: its blocks are not seen"
            for instance, kvd in self._kvds.items()
            if not kvd.feed.is_in_step
        )
        return found

    async def close(self) -> None:
        """Stop following everything."""
        tasks = [rank.task for ranks in self._ranks.values() for rank in ranks.values()]
        tasks += [kvd.task for kvd in self._kvds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _shared_holders(self, record: WorkerRecord) -> tuple[int, ...]:
        kvd = self._kvds.get(record.kvd.instance) if record.kvd else None
        if kvd is None or record.kvd is None or record.kvd.namespace not in kvd.readers:
            return ()
        return (kvd.feed.add_namespace(record.kvd.namespace),)

    def _add_reader(self, source: KvdSource, incarnation: str) -> None:
        if source.pub is None or source.snapshot is None:
            return
        kvd = self._kvds.get(source.instance)
        if kvd is None:
            feed = KvdFeed(self._zmq(), source.instance, source.pub, source.snapshot, self.map, self.kvd_counters)
            kvd = self._kvds[source.instance] = _Kvd(feed, _start(feed.run(), f"kvd {source.instance}"))
        try:
            kvd.feed.add_namespace(source.namespace)
        except ValueError as error:
            _log.warning("cachemap: kvd %s: %s; its blocks are not seen for this worker", source.instance, error)
            return
        kvd.readers.setdefault(source.namespace, set()).add(incarnation)

    def _remove_reader(self, source: KvdSource, incarnation: str) -> None:
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


def _start(work: Any, name: str) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.create_task(work, name=f"events of {name}")
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("cachemap: %s stopped: %r", task.get_name(), task.exception())
