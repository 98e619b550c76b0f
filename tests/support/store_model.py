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

from kvd.client.arena import Arena, Location
from kvd.protocol import COMMITMENT, GRANT, WISH
from kvd.store import Store, index_bytes, ledger_bytes

UNIT_BYTES = 4096
INSTANCE = bytes(range(16))
LIFETIME_NS = 100
INCOMPLETE_MAX_NS = 150


def extent_bytes(shard_bytes: int) -> int:
    """Space of one shard."""
    return -(-shard_bytes // UNIT_BYTES) * UNIT_BYTES


@dataclass
class Kind:
    """One class."""

    class_id: int
    shard_bytes: tuple[int, ...]

    @property
    def full_mask(self) -> int:
        """All shards."""
        return (1 << len(self.shard_bytes)) - 1

    @property
    def size_bytes(self) -> int:
        """Space of one record."""
        return sum(extent_bytes(size) for size in self.shard_bytes)


@dataclass
class Record:
    """A record in the index; `extents` says where in the data each reserved or committed shard begins."""

    kind: Kind
    key: bytes
    born_ns: int
    extents: dict[int, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        """Whether all shards are committed."""
        return len(self.committed) == len(self.kind.shard_bytes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of each extent."""
        return [(at, at + extent_bytes(self.kind.shard_bytes[shard])) for shard, at in self.extents.items()]

    def content(self, shard: int) -> bytes:
        """What belongs into a shard."""
        size = self.kind.shard_bytes[shard]
        seed = hashlib.sha256(self.key + bytes([shard]) + self.kind.class_id.to_bytes(4, "little")).digest()
        return (seed * (size // 32 + 1))[:size]


@dataclass
class Reservation:
    """The right to write one shard at `extent`. `record` is out of the index when it is in quarantine."""

    record: Record
    shard: int
    extent: int
    deadline_ns: int
    is_quarantined: bool = False

    @property
    def size_bytes(self) -> int:
        """Space of it."""
        return extent_bytes(self.record.kind.shard_bytes[self.shard])


@dataclass
class Client:
    """An attached client with its view."""

    number: int
    arena: Arena
    reservations: dict[int, Reservation] = field(default_factory=dict)
    pins: list[tuple[Record, int]] = field(default_factory=list)


class StoreModel:
    """See the module."""

    def __init__(self, *, data_bytes: int, records: int, shards_max: int = 8, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.records_wanted = records
        self._files = [os.memfd_create("index"), os.memfd_create("data")]
        os.ftruncate(self._files[0], index_bytes(records, shards_max, data_bytes))
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
        self.quarantine: list[Reservation] = []
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
        class_id = self.store.open_class(number.to_bytes(16, "big"), number % 3, shard_bytes, f"model-{number}")
        kind = Kind(class_id, shard_bytes)
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
            answer = self.store.reserve(
                client.number, kind.class_id, shard, lib.STORE_RETAIN_SHORT, 0, wish, self.now_ns, deadline_ns
            )
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
        else:
            expected = [lib.STORE_OK, lib.STORE_NO_SPACE]
        assert status in expected, (status, expected)
        self.counts[f"reserve {status}"] += 1
        if status != lib.STORE_OK:
            assert name == 0
            return
        assert offset % UNIT_BYTES == 0
        if record is None:
            record = Record(kind, key, self.now_ns)
            self.records[place] = record
        assert name not in client.reservations
        record.extents[shard] = offset
        record.reserved[shard] = name
        client.reservations[name] = Reservation(record, shard, offset, deadline_ns)
        self.check_no_overlap()

    def write(self, reservation: Reservation, content: bytes) -> None:
        """What the client's copy does."""
        self.data[reservation.extent : reservation.extent + len(content)] = content

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
        if reservation.is_quarantined:
            self.quarantine.remove(reservation)
            return
        del record.reserved[reservation.shard]
        if reservation.shard not in record.committed:
            del record.extents[reservation.shard]
        if not record.committed and not record.reserved:
            self._drop_incomplete(record)

    def _drop_incomplete(self, record: Record) -> None:
        assert not record.is_present
        del self.records[record.kind.class_id, record.key]
        for client in self.clients.values():
            for reservation in client.reservations.values():
                if reservation.record is record:
                    reservation.is_quarantined = True
                    self.quarantine.append(reservation)

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

    def pin(self, client: Client, kind: Kind, key: bytes) -> int | None:
        """Pin through the client's view; the slot, or None."""
        record = self.records.get((kind.class_id, key))
        slots = client.arena.pin_run(kind.class_id, kind.full_mask, key)
        if record is None or not record.is_present:
            assert not slots
            return None
        if not slots:
            mine = sum(other is record for other, _ in client.pins)
            assert mine == lib.ARENA_PINS_PER_RECORD_MAX
            return None
        for shard, checksum in record.committed.items():
            size = extent_bytes(kind.shard_bytes[shard])
            assert client.arena.locate(slots[0], shard) == Location(record.extents[shard], size, checksum)
        client.pins.append((record, slots[0]))
        self.counts["pinned"] += 1
        return slots[0]

    def unpin(self, client: Client, position: int) -> None:
        """Give one of the client's pins back."""
        _, slot = client.pins.pop(position)
        client.arena.unpin(slot)

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
        held = [(reservation.extent, reservation.extent + reservation.size_bytes) for reservation in self.quarantine]
        spans = sorted([span for record in self.records.values() for span in record.spans] + held)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start
        assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= len(self.data))

    def check_bytes(self, record: Record) -> None:
        """A present record's bytes are those committed."""
        for shard, at in record.extents.items():
            content = record.content(shard)
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
        quarantined = sum(reservation.size_bytes for reservation in self.quarantine)
        used = sum(end - start for record in self.records.values() for start, end in record.spans) + quarantined
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
