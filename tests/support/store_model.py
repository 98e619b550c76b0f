"""A store under test beside a naive model of it in Python.

`StoreModel` does every operation on both and compares. It predicts all that is certain (who may write where,
what is present, when space comes back) and leaves open only which record is evicted: that it learns from the
events, and checks that the victim was evictable.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from infera_core import ffi, lib

from kvd.client.arena import Arena, PinnedRecord
from kvd.protocol import COMMITMENT, GRANT, WISH
from kvd.store import Store, index_bytes, ledger_bytes

UNIT_BYTES = 4096
INSTANCE = bytes(range(16))
LIFETIME_NS = 100
INCOMPLETE_MAX_NS = 150


def units_of(shard_bytes: tuple[int, ...]) -> int:
    """Units of one record."""
    return sum(-(-size // UNIT_BYTES) for size in shard_bytes)


@dataclass
class Kind:
    """One class."""

    class_id: int
    shard_bytes: tuple[int, ...]
    offsets: list[int]

    @property
    def full_mask(self) -> int:
        """All shards."""
        return (1 << len(self.shard_bytes)) - 1

    @property
    def size_bytes(self) -> int:
        """Space of one record."""
        return units_of(self.shard_bytes) * UNIT_BYTES


@dataclass
class Record:
    """A record in the index; `extent` is its first byte in the data."""

    kind: Kind
    key: bytes
    extent: int
    born_ns: int
    committed: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        """Whether all shards are committed."""
        return len(self.committed) == len(self.kind.shard_bytes)

    def content(self, shard: int) -> bytes:
        """What belongs into a shard."""
        size = self.kind.shard_bytes[shard]
        seed = hashlib.sha256(self.key + bytes([shard]) + self.kind.class_id.to_bytes(4, "little")).digest()
        return (seed * (size // 32 + 1))[:size]


@dataclass
class Reservation:
    """The right to write one shard. `record` is out of the index when it is in quarantine."""

    record: Record
    shard: int
    deadline_ns: int
    is_quarantined: bool = False


@dataclass
class Client:
    """An attached client with its view."""

    number: int
    arena: Arena
    reservations: dict[int, Reservation] = field(default_factory=dict)
    pins: list[tuple[Record, PinnedRecord]] = field(default_factory=list)


class StoreModel:
    """See the module."""

    def __init__(self, *, data_bytes: int, records: int, shards_max: int = 8, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.records_wanted = records
        self._files = [os.memfd_create("index"), os.memfd_create("data")]
        os.ftruncate(self._files[0], index_bytes(records, shards_max))
        os.ftruncate(self._files[1], data_bytes)
        self._index = mmap.mmap(self._files[0], 0)
        self.data = mmap.mmap(self._files[1], 0)
        self.store = Store(
            self._index, instance=INSTANCE, generation=1, records=records, shards_max=shards_max,
            data_bytes=data_bytes, seed=(self.dice.getrandbits(64), self.dice.getrandbits(64)),
        )  # fmt: skip
        self._looker = self._view_without_ledger(data_bytes)
        self.now_ns = 1000
        self.kinds: list[Kind] = []
        self.clients: dict[int, Client] = {}
        self.records: dict[tuple[int, bytes], Record] = {}
        self.quarantine: list[Record] = []
        self.told_present: set[tuple[int, bytes]] = set()
        self.seen: set[tuple[int, bytes]] = set()
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        """Free everything."""
        self.clients.clear()
        lib.arena_view_close(self._looker)
        ffi.release(self._looker_index)
        self.store.close()
        self._index.close()
        self.data.close()
        for descriptor in self._files:
            os.close(descriptor)

    def _ledger(self) -> int:
        descriptor = os.memfd_create("ledger")
        os.ftruncate(descriptor, ledger_bytes(self.records_wanted))
        return descriptor

    def _view_without_ledger(self, data_bytes: int) -> Any:
        status = ffi.new("int *")
        self._looker_index = ffi.from_buffer(self._index)
        view = lib.arena_view_open(
            self._looker_index, len(self._index), ffi.NULL, data_bytes, ffi.NULL, 0, status
        )  # fmt: skip
        assert view != ffi.NULL, status[0]
        return view

    # ---- operations ----

    def open_class(self, shard_bytes: tuple[int, ...], name: int | None = None) -> Kind:
        """A new class."""
        number = len(self.kinds) if name is None else name
        opened = self.store.open_class(number.to_bytes(16, "big"), number % 3, shard_bytes, f"model-{number}")
        kind = Kind(opened.class_id, shard_bytes, opened.shard_offsets)
        self.kinds.append(kind)
        return kind

    def attach(self) -> Client:
        """A new client."""
        ledger = self._ledger()
        memory = mmap.mmap(ledger, 0)
        number = self.store.attach(memory, token=7)
        assert number not in self.clients
        arena = Arena(INSTANCE.hex(), os.dup(self._files[0]), os.dup(self._files[1]), ledger)
        self.clients[number] = Client(number, arena)
        return self.clients[number]

    def detach(self, client: Client) -> None:
        """The client's process has died."""
        self.store.detach(client.number)
        del self.clients[client.number]
        for reservation in client.reservations.values():
            self._resolve(reservation)

    def reserve(self, client: Client, kind: Kind, shard: int, keys: list[bytes]) -> list[int]:
        """Returns the statuses. One call a key: an eviction for one key may take away another of them."""
        statuses = []
        for key in keys:
            deadline_ns = self.now_ns + LIFETIME_NS
            wish = WISH.pack(key, 1, 0)
            answer = self.store.reserve(client.number, kind.class_id, shard, 0, 0, wish, self.now_ns, deadline_ns)
            self._take_events()
            ((name, offset, status, _),) = GRANT.iter_unpack(answer)
            self._reserved(client, kind, shard, key, name, offset, status, deadline_ns)
            statuses.append(status)
        return statuses

    def _reserved(
        self, client: Client, kind: Kind, shard: int, key: bytes, name: int, offset: int, status: int, deadline_ns: int
    ) -> None:
        place = (kind.class_id, key)
        self.seen.add(place)
        record = self.records.get(place)
        if record is not None and shard in record.committed:
            expected = [lib.STORE_EXISTS]
        elif record is not None and shard in record.reserved:
            expected = [lib.STORE_BUSY]
        elif record is not None:
            expected = [lib.STORE_OK]
        else:
            expected = [lib.STORE_OK, lib.STORE_NO_SPACE]
        assert status in expected, (status, expected)
        self.counts[f"reserve {status}"] += 1
        if status != lib.STORE_OK:
            assert name == 0
            return
        assert offset % UNIT_BYTES == 0
        if record is None:
            record = Record(kind, key, offset - kind.offsets[shard], self.now_ns)
            self.records[place] = record
        assert offset == record.extent + kind.offsets[shard]
        assert name not in client.reservations
        record.reserved[shard] = name
        client.reservations[name] = Reservation(record, shard, deadline_ns)
        self.check_no_overlap()

    def write(self, reservation: Reservation, content: bytes) -> None:
        """What the client's copy does."""
        at = reservation.record.extent + reservation.record.kind.offsets[reservation.shard]
        self.data[at : at + len(content)] = content

    def commit(self, client: Client, name: int) -> int:
        """Write and commit one shard; returns the status."""
        reservation = client.reservations.get(name)
        if reservation is not None:
            content = reservation.record.content(reservation.shard)
            # Whoever is too late still writes; nobody else's bytes may suffer.
            self.write(reservation, b"\xee" * len(content) if reservation.is_quarantined else content)
        checksum = self.dice.getrandbits(64)
        (status,) = struct.unpack("<I", self.store.commit(client.number, COMMITMENT.pack(name, checksum)))
        if reservation is None or reservation.is_quarantined:
            assert status == lib.STORE_STALE
        else:
            assert status == lib.STORE_OK
        if reservation is not None:
            del client.reservations[name]
            if not reservation.is_quarantined:
                reservation.record.committed[reservation.shard] = checksum
            self._resolve(reservation)
        self.counts[f"commit {status}"] += 1
        return status

    def give_up(self, client: Client, name: int) -> None:
        """Give one reservation back."""
        self.store.give_up(client.number, name.to_bytes(8, "little"))
        reservation = client.reservations.pop(name, None)
        if reservation is not None:
            self._resolve(reservation)

    def _resolve(self, reservation: Reservation) -> None:
        """A reservation ended, by commit, giving up or death."""
        record = reservation.record
        del record.reserved[reservation.shard]
        if reservation.is_quarantined:
            if not record.reserved:
                self.quarantine.remove(record)
        elif not record.committed and not record.reserved:
            self._drop_incomplete(record)

    def _drop_incomplete(self, record: Record) -> None:
        assert not record.is_present
        del self.records[record.kind.class_id, record.key]
        if record.reserved:
            self.quarantine.append(record)
            for client in self.clients.values():
                for reservation in client.reservations.values():
                    reservation.is_quarantined |= reservation.record is record

    def expire(self, passed_ns: int) -> None:
        """Let time pass."""
        self.now_ns += passed_ns
        self.store.expire(self.now_ns, INCOMPLETE_MAX_NS)
        late: list[Record] = []
        for client in self.clients.values():
            for reservation in client.reservations.values():
                if not reservation.is_quarantined and reservation.deadline_ns < self.now_ns:
                    late.append(reservation.record)
        for record in list(self.records.values()):
            is_old = not record.is_present and record.born_ns + INCOMPLETE_MAX_NS < self.now_ns
            if is_old or any(record is other for other in late):
                self._drop_incomplete(record)
                self.counts["expired"] += 1

    def touch(self, kind: Kind, keys: list[bytes]) -> None:
        """Hits, in chain order."""
        self.store.touch(kind.class_id, b"".join(keys))

    def drop(self, kind: Kind, key: bytes) -> int:
        """Drop one record; returns the status."""
        record = self.records.get((kind.class_id, key))
        status = int(lib.store_drop(self.store._handle, kind.class_id, key))
        if record is None or not record.is_present:
            assert status == lib.STORE_ABSENT
        else:
            assert status == (lib.STORE_PINNED if self.is_pinned(record) else lib.STORE_OK)
        self.counts[f"drop {status}"] += 1
        return status

    def drop_class(self, kind: Kind) -> None:
        """Drop all that is not pinned."""
        mine = [record for record in self.records.values() if record.kind is kind and record.is_present]
        assert self.store.drop_class(kind.class_id) == sum(not self.is_pinned(record) for record in mine)

    def pin(self, client: Client, kind: Kind, key: bytes) -> PinnedRecord | None:
        """Pin through the client's view."""
        record = self.records.get((kind.class_id, key))
        pinned = client.arena.pin(kind.class_id, kind.full_mask, key)
        if record is None or not record.is_present:
            assert pinned is None
            return None
        if pinned is None:
            mine = sum(other is record for other, _ in client.pins)
            assert mine == lib.ARENA_PINS_PER_RECORD_MAX
            return None
        assert (pinned.offset_bytes, pinned.size_bytes) == (record.extent, kind.size_bytes)
        for shard, checksum in record.committed.items():
            assert client.arena.shard_sum(pinned.slot, shard) == checksum
        client.pins.append((record, pinned))
        self.counts["pinned"] += 1
        return pinned

    def unpin(self, client: Client, position: int) -> None:
        """Give one of the client's pins back."""
        _, pinned = client.pins.pop(position)
        client.arena.unpin(pinned.slot)

    def is_pinned(self, record: Record) -> bool:
        """Whether any client holds a pin on a record."""
        return any(other is record for client in self.clients.values() for other, _ in client.pins)

    # ---- checks ----

    def _take_events(self) -> None:
        events, lost = self.store.take_events()
        assert not lost
        for event in events:
            for start in range(0, len(event.keys), 16):
                self._replay(event.class_id, event.keys[start : start + 16], event.is_removed)

    def _replay(self, class_id: int, key: bytes, is_removed: bool) -> None:
        place = (class_id, key)
        if not is_removed:
            assert place not in self.told_present
            self.told_present.add(place)
            return
        assert place in self.told_present
        self.told_present.remove(place)
        record = self.records.pop(place)
        assert record.is_present
        assert not self.is_pinned(record), "a pinned record was evicted"
        self.counts["removed"] += 1

    def check_no_overlap(self) -> None:
        """No two live extents share a byte; those in quarantine count."""
        live = [*self.records.values(), *self.quarantine]
        spans = sorted((record.extent, record.extent + record.kind.size_bytes) for record in live)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start
        assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= len(self.data))

    def check_bytes(self, record: Record) -> None:
        """A present record's bytes are those committed."""
        for shard, offset in enumerate(record.kind.offsets):
            content = record.content(shard)
            at = record.extent + offset
            assert self.data[at : at + len(content)] == content

    def check(self, *, all_bytes: bool = False) -> None:
        """Everything that must hold between two operations."""
        self._take_events()
        assert self.store.audit() is None
        present = {place for place, record in self.records.items() if record.is_present}
        assert self.told_present == present
        snapshot = [
            (event.class_id, event.keys[i : i + 16])
            for event in self.store.snapshot()
            for i in range(0, len(event.keys), 16)
        ]
        assert len(snapshot) == len(set(snapshot))
        assert set(snapshot) == present
        self.check_no_overlap()
        self._check_stats(len(present))
        pinned = [record for client in self.clients.values() for record, _ in client.pins]
        some = [self.records[place] for place in present if all_bytes or self.dice.random() < 0.1]
        for record in [*pinned, *some]:
            assert self.records[record.kind.class_id, record.key] is record
            self.check_bytes(record)
        for client in self.clients.values():
            assert client.arena.pins_held() == len(client.pins)

    def _check_stats(self, present: int) -> None:
        stats = self.store.stats()
        incomplete = sum(not record.is_present for record in self.records.values())
        quarantined = sum(record.kind.size_bytes for record in self.quarantine)
        used = sum(record.kind.size_bytes for record in self.records.values()) + quarantined
        assert stats["records_present"] == present
        assert stats["records_incomplete"] == incomplete
        assert stats["quarantined_bytes"] == quarantined
        assert stats["used_bytes"] == used
        assert stats["reservations"] == sum(len(client.reservations) for client in self.clients.values())
        assert stats["clients"] == len(self.clients)

    def check_look_ups(self) -> None:
        """What a reader finds is exactly what is present, for every key ever used."""
        for kind in self.kinds:
            keys = sorted(key for class_id, key in self.seen if class_id == kind.class_id)
            if not keys:
                continue
            expected = [(record := self.records.get((kind.class_id, key))) and record.is_present for key in keys]
            packed = b"".join(keys)
            out = bytearray(len(keys))
            found = lib.arena_probe_each(
                self._looker, kind.class_id, kind.full_mask, packed, len(keys), ffi.from_buffer(out)
            )  # fmt: skip
            assert [bool(byte) for byte in out] == [bool(one) for one in expected]
            assert found == sum(out)
            leading = lib.arena_probe_run(self._looker, kind.class_id, kind.full_mask, packed, len(keys), ffi.NULL)
            assert leading == (out.index(0) if 0 in out else len(out))
