"""Typed entrance to the C store: the daemon's books over an arena (see `csrc/store.h`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infera_core import ffi, lib

KEY_BYTES = 16
EVENTS_PER_TAKE = 4096
RECORDS_MAX: int = lib.STORE_RECORDS_MAX

STATUS_TEXT = {
    lib.STORE_CLASSES_FULL: (
        f"the arena already holds {lib.ARENA_CLASSES_MAX} classes or 64 record sizes; "
        "restart infera-kvd to begin a new arena"
    ),
    lib.STORE_MISMATCH: "this namespace and group exist with other shard sizes; the namespace digest must differ",
    lib.STORE_TOO_LARGE: (
        "a record does not fit the arena, or has more shards than infera-kvd was started for "
        "(see --memory and --shards-max)"
    ),
}


class StoreRefusedError(Exception):
    """The store cannot do what was asked; the text says why and what helps."""


@dataclass(frozen=True)
class OpenedClass:
    """One (namespace, group): its id in the arena and where each shard lies in a record."""

    class_id: int
    shard_offsets: list[int]


@dataclass(frozen=True)
class StoreEvent:
    """Records of one class that became present or went away. `keys` is n times 16 bytes."""

    class_id: int
    is_removed: bool
    keys: bytes


class Store:
    """The store over mapped files. Not thread-safe: one thread calls in.

    `index` is a writable zeroed buffer of `index_bytes(records, shards_max)` bytes and must outlive
    the store.
    """

    def __init__(
        self, index: Any, *, instance: bytes, generation: int, records: int, shards_max: int,
        data_bytes: int, seed: tuple[int, int],
    ) -> None:  # fmt: skip
        self._index = ffi.from_buffer(index, require_writable=True)
        self._handle = lib.store_create(self._index, instance, generation, records, shards_max, data_bytes, list(seed))
        if self._handle == ffi.NULL:
            raise MemoryError("not enough memory for the store's books")
        self._ledgers: dict[int, Any] = {}
        self._events = ffi.new("store_event[]", EVENTS_PER_TAKE)

    def close(self) -> None:
        """Free the books and let go of the mapped buffers."""
        if self._handle != ffi.NULL:
            lib.store_destroy(self._handle)
            self._handle = ffi.NULL
        for ledger in self._ledgers.values():
            ffi.release(ledger)
        self._ledgers.clear()
        ffi.release(self._index)

    def attach(self, ledger: Any, token: int) -> int:
        """Register a client's ledger buffer and return the client's number.

        Raises:
            StoreRefusedError: at `STORE_CLIENTS_MAX` clients.
        """
        buffer = ffi.from_buffer(ledger, require_writable=True)
        client = lib.store_client_attach(self._handle, buffer, token)
        if client < 0:
            ffi.release(buffer)
            raise StoreRefusedError(f"infera-kvd serves at most {lib.STORE_CLIENTS_MAX} client processes")
        self._ledgers[client] = buffer
        return int(client)

    def detach(self, client: int) -> None:
        """Forget a dead client: its pins, reservations and ledger."""
        lib.store_client_detach(self._handle, client)
        ffi.release(self._ledgers.pop(client))

    def open_class(self, name_space: bytes, group: int, shard_bytes: Sequence[int], model: str) -> OpenedClass:
        """Find or make the class of a (namespace, group).

        Raises:
            StoreRefusedError: when the geometry differs from the known one or does not fit.
            ValueError: when the namespace is not 16 bytes.
        """
        if not 1 <= len(shard_bytes) <= lib.ARENA_SHARDS_MAX:
            raise StoreRefusedError(STATUS_TEXT[lib.STORE_TOO_LARGE])
        if len(name_space) != 16:
            raise ValueError(f"a namespace has 16 bytes, not {len(name_space)}")
        class_id = ffi.new("uint32_t *")
        offsets = ffi.new("uint64_t[]", len(shard_bytes))
        status = lib.store_class_open(
            self._handle, name_space, group, len(shard_bytes), list(shard_bytes), model.encode()[:127],
            class_id, offsets,
        )  # fmt: skip
        if status != lib.STORE_OK:
            raise StoreRefusedError(STATUS_TEXT.get(status, f"store status {status}"))
        return OpenedClass(int(class_id[0]), list(offsets))

    def reserve(
        self, client: int, class_id: int, shard: int, retention: int, tenant_tag: int, wishes: bytes,
        now_ns: int, deadline_ns: int,
    ) -> bytes:  # fmt: skip
        """Answer an array of `store_wish` with an array of `store_grant`, both as packed bytes."""
        count = len(wishes) // ffi.sizeof("store_wish")
        grants = ffi.new("store_grant[]", count)
        lib.store_reserve(
            self._handle, client, class_id, shard, retention, tenant_tag,
            ffi.from_buffer("store_wish[]", wishes), count, now_ns, deadline_ns, grants,
        )  # fmt: skip
        return bytes(ffi.buffer(grants))

    def commit(self, client: int, commitments: bytes) -> bytes:
        """Publish an array of `store_commitment`; returns one u32 status each, packed."""
        count = len(commitments) // ffi.sizeof("store_commitment")
        statuses = ffi.new("uint32_t[]", count)
        lib.store_commit(self._handle, client, ffi.from_buffer("store_commitment[]", commitments), count, statuses)
        return bytes(ffi.buffer(statuses))

    def give_up(self, client: int, reservations: bytes) -> None:
        """Give reservations (packed u64) back unused."""
        lib.store_give_up(self._handle, client, ffi.from_buffer("uint64_t[]", reservations), len(reservations) // 8)

    def touch(self, class_id: int, keys: bytes) -> None:
        """Note that these records, in chain order, were useful."""
        lib.store_touch(self._handle, class_id, keys, len(keys) // KEY_BYTES)

    def verify(self, data: Any, class_id: int, keys: bytes) -> int:
        """Check records against their checksums, drop the damaged ones; returns how many those were.

        `data` is the mapped data file.
        """
        view = ffi.from_buffer(data)
        starts = range(0, len(keys), KEY_BYTES)
        statuses = [lib.store_verify(self._handle, view, class_id, keys[i : i + KEY_BYTES]) for i in starts]
        ffi.release(view)
        return statuses.count(lib.STORE_DAMAGED)

    def drop_class(self, class_id: int) -> int:
        """Drop all records of a class that nobody reads; returns how many."""
        return int(lib.store_drop_class(self._handle, class_id))

    def expire(self, now_ns: int, incomplete_max_ns: int) -> None:
        """Apply deadlines."""
        lib.store_expire(self._handle, now_ns, incomplete_max_ns)

    def take_events(self) -> tuple[list[StoreEvent], bool]:
        """Return pending events, runs of one kind joined, and whether some were lost before them."""
        events: list[StoreEvent] = []
        any_lost = False
        lost = ffi.new("int *")
        while True:
            taken = lib.store_take_events(self._handle, self._events, EVENTS_PER_TAKE, lost)
            any_lost = any_lost or bool(lost[0])
            events.extend(self._joined(taken))
            if taken < EVENTS_PER_TAKE:
                return events, any_lost

    def snapshot(self) -> Iterator[StoreEvent]:
        """Yield all present records. Must be consumed without other calls in between."""
        cursor = ffi.new("uint64_t *")
        while taken := lib.store_snapshot(self._handle, cursor, self._events, EVENTS_PER_TAKE):
            yield from self._joined(taken)

    def _joined(self, count: int) -> list[StoreEvent]:
        joined: list[StoreEvent] = []
        keys = bytearray()
        for i in range(count):
            event = self._events[i]
            keys += ffi.buffer(event.key)
            following = self._events[i + 1] if i + 1 < count else None
            if following is None or following.class_id != event.class_id or following.is_removed != event.is_removed:
                joined.append(StoreEvent(event.class_id, bool(event.is_removed), bytes(keys)))
                keys.clear()
        return joined

    def stats(self) -> dict[str, int]:
        """Return the counters of `store_stats` by name."""
        stats = ffi.new("store_stats *")
        lib.store_read_stats(self._handle, stats)
        return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("store_stats").fields}

    def audit(self) -> str | None:
        """Return None when all books add up, else what does not."""
        wrong = lib.store_audit(self._handle)
        return None if wrong == ffi.NULL else ffi.string(wrong).decode()


def index_bytes(records: int, shards_max: int) -> int:
    """Bytes of the index file for that many records (rounded up to a power of two)."""
    return int(lib.arena_index_bytes(records, shards_max))


def ledger_bytes(records: int) -> int:
    """Bytes of one client's ledger file."""
    return int(lib.arena_ledger_bytes(records))


def record_capacity(records: int) -> int:
    """Records the index really has room for."""
    return int(lib.arena_record_capacity(records))
