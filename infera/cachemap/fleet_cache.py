"""The cache map of a whole fleet: follows workers as they come and go, and answers for all of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from infera_core.keys import GRAIN_TOKENS, KEY_BYTES

from infera.cachemap.follower import Follower, now_ms
from infera.cachemap.interface import Match, Target, Tier, WorkerHolders
from infera.cachemap.load_table import LoadLane
from infera.cachemap.native_map import MapReader
from infera.discovery.record import WorkerRecord


class Ingest(Protocol):
    """Whoever follows events and writes the map: another process, or (in tests and tools) this one."""

    @property
    def reader(self) -> MapReader | None:
        """The map; None while nobody keeps one."""

    @property
    def directory(self) -> Mapping[str, WorkerHolders]:
        """Incarnation -> where its blocks are entered, for the workers that are followed."""

    @property
    def load_lane(self) -> LoadLane | None:
        """This process's lane of the host's load table; None while there is none."""

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest."""

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held."""

    def predict(self, holder: int, keys: bytes) -> None:
        """Enter what a request just sent there will store."""

    def problems(self) -> list[str]:
        """What is not followed, in words."""

    async def start(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """Stop following everything."""


class LocalIngest:
    """Follows events in this process. For tests and tools: a server that does this answers late."""

    def __init__(self) -> None:
        self.directory: dict[str, WorkerHolders] = {}
        self._follower = Follower(on_change=self._changed)
        self.reader = self._follower.map
        self.load_lane: LoadLane | None = None

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""
        self._follower.add_worker(record)

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest."""
        self._follower.change_worker(old, new)

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held."""
        self._follower.remove_worker(record)

    def predict(self, holder: int, keys: bytes) -> None:
        """Enter what a request just sent there will store."""
        self.reader.predict(holder, keys, now_ms=now_ms())

    def problems(self) -> list[str]:
        """What is not followed, in words."""
        return self._follower.problems()

    async def start(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Stop following everything."""
        await self._follower.close()

    def _changed(self, incarnation: str) -> None:
        holders = self._follower.holders(incarnation)
        if holders == WorkerHolders():
            self.directory.pop(incarnation, None)
        else:
            self.directory[incarnation] = holders


class FleetCache:
    """What a server asks. Every method but ``start`` and ``close`` is synchronous and runs on the event loop."""

    def __init__(self, ingest: Ingest | None = None) -> None:
        self.ingest: Ingest = ingest if ingest is not None else LocalIngest()
        # Targets change when holders do or when events name a block size; they are asked for with every pick.
        self._targets: dict[tuple[str, int], tuple[WorkerHolders, int, Target]] = {}

    async def start(self) -> None:
        """Begin to follow."""
        await self.ingest.start()

    async def close(self) -> None:
        """Stop following everything."""
        await self.ingest.close()

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""
        self.ingest.add_worker(record)

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest: a restarted kvd must not cost every engine's entries."""
        self.ingest.change_worker(old, new)

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held, and its kvd when nobody else reads it."""
        self.ingest.remove_worker(record)
        for place in [place for place in self._targets if place[0] == record.incarnation]:
            del self._targets[place]

    def target(self, record: WorkerRecord, dp_rank: int) -> Target | None:
        """Where to look for a worker's blocks; None when it cannot be looked up (no events and no kvd)."""
        holders = self.ingest.directory.get(record.incarnation)
        reader = self.ingest.reader
        if holders is None or reader is None:
            return None
        own = holders.ranks.get(dp_rank)
        # What the engine publishes is what it does; the record is what it was configured to do.
        seen = reader.block_size_tokens(own) if own is not None else None
        block_size = seen or record.block_size_tokens or 0
        known = self._targets.get((record.incarnation, dp_rank))
        if known is not None and known[0] is holders and known[1] == block_size:
            return known[2]
        if (own is None and not holders.shared) or not block_size:
            return None
        # Pages below the grain are gathered into grains.
        stride = max(1, block_size // GRAIN_TOKENS)
        if block_size % GRAIN_TOKENS and GRAIN_TOKENS % block_size:
            return None
        target = Target(stride, own, holders.shared)
        self._targets[record.incarnation, dp_rank] = (holders, block_size, target)
        return target

    def match(self, keys: bytes, targets: Sequence[Target]) -> list[Match]:
        """Longest usable prefix of one prompt for every target."""
        reader = self.ingest.reader
        return reader.match(keys, targets) if reader is not None else [Match()] * len(targets)

    def predict(self, record: WorkerRecord, dp_rank: int, keys: bytes) -> None:
        """Say that a request with this prompt was just sent to a worker. Its blocks count as there until the
        worker's events tell, or for ten seconds."""
        holders = self.ingest.directory.get(record.incarnation)
        target = self.target(record, dp_rank)
        if holders is None or target is None or target.own_holder is None:
            return
        step = target.stride_grains * KEY_BYTES
        ends = (
            keys
            if target.stride_grains == 1
            else b"".join(keys[end - KEY_BYTES : end] for end in range(step, len(keys) + 1, step))
        )
        self.ingest.predict(target.own_holder, ends)

    def blocks_by_tier(self, record: WorkerRecord) -> dict[str, int]:
        """Blocks a worker can use, by tier; those of its kvd are shared with others."""
        total: Counter[str] = Counter()
        holders = self.ingest.directory.get(record.incarnation)
        reader = self.ingest.reader
        if holders is not None and reader is not None:
            for holder in (*holders.ranks.values(), *holders.shared):
                for tier, count in reader.blocks_by_tier(holder).items():
                    total[Tier(tier).name.lower()] += count
        return dict(total)

    def has_seen_events(self, record: WorkerRecord) -> bool:
        """Whether any event of the worker ever came, on any of its ranks."""
        holders = self.ingest.directory.get(record.incarnation)
        reader = self.ingest.reader
        if holders is None or reader is None:
            return False
        return any(reader.frames_seen(holder) for holder in holders.ranks.values())

    @property
    def entry_count(self) -> int:
        """Blocks known, over all workers and tiers."""
        reader = self.ingest.reader
        return reader.entry_count if reader is not None else 0

    def counters(self, source: str) -> Counter[str]:
        """What became of the events of a source, "engine" or "kvd"."""
        reader = self.ingest.reader
        return reader.counters(source) if reader is not None else Counter()

    def problems(self) -> list[str]:
        """What makes predictions worse than they could be, in words."""
        found = list(self.ingest.problems())
        reader = self.ingest.reader
        if reader is not None and reader.entry_count >= reader.entry_limit:
            found.append(f"the cache map is full with {reader.entry_limit} entries: new blocks are not seen")
        return found
