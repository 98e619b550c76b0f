"""Typed entrance to the C store: the daemon's books over an arena (see `csrc/store.h`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from infera_core import ffi, lib

from kvd.retention import TenantUsage

P = ParamSpec("P")
R = TypeVar("R")

KEY_BYTES = 16
EVENTS_PER_TAKE = 4096
RECORDS_MAX: int = lib.STORE_RECORDS_MAX
CLASSES_MAX: int = lib.ARENA_CLASSES_MAX

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
class StoreEvent:
    """Records of one class that became present or went away. `keys` is n times 16 bytes."""

    class_id: int
    is_removed: bool
    keys: bytes


@dataclass(frozen=True)
class ArenaFacts:
    """What the header of an index says. `records` is its capacity."""

    instance: bytes
    generation: int
    data_bytes: int
    records: int
    shards_max: int


@dataclass(frozen=True)
class ClientFacts:
    """What a ledger says of its client."""

    token: int
    pid: int
    name: str


@dataclass(frozen=True)
class ClassIdentity:
    """What a class id stands for."""

    namespace: bytes
    group: int
    model: str


@dataclass(frozen=True)
class Listing:
    """One record as `ls` shows it. `tenant_tag` and `shard_mask` are 64-bit numbers."""

    class_id: int
    key: bytes
    depth_grains: int
    retention: int
    expires_s: int
    is_present: bool
    tenant_tag: int
    shard_mask: int
    stored_bytes: int


def _guarded(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Hold the store's guard during a method."""

    @functools.wraps(method)
    def call(self: Store, *arguments: P.args, **keywords: P.kwargs) -> R:
        with self.guard:
            return method(self, *arguments, **keywords)

    return call  # type: ignore[return-value]


class Store:
    """The store over mapped files. Every method holds `guard`, which whoever else calls into the same C
    store must hold too; by itself it is nothing, and one thread calls in.

    `index` is a writable zeroed buffer of `index_bytes(...)` bytes and must outlive
    the store.
    """

    def __init__(
        self, index: Any, *, instance: bytes, generation: int, records: int, shards_max: int,
        data_bytes: int, seed: tuple[int, int],
    ) -> None:  # fmt: skip
        buffer = ffi.from_buffer(index, require_writable=True)
        self._begin(buffer, lib.store_create(buffer, instance, generation, records, shards_max, data_bytes, list(seed)))

    @classmethod
    def adopt(cls, index: Any, data_bytes: int, ledgers: Sequence[Any] = ()) -> tuple[Store, list[int | None]]:
        """Make the store of an index that an earlier daemon left; its header was checked by `read_facts`.

        `ledgers` are the mapped ledgers of processes that live. Returns the store and the number of each of those
        clients, None for what is no ledger of this arena.
        """
        store = cls.__new__(cls)
        buffer = ffi.from_buffer(index, require_writable=True)
        store._begin(buffer, lib.store_adopt(buffer, len(buffer), data_bytes))
        numbers: list[int | None] = []
        for ledger in ledgers:
            part = ffi.from_buffer(ledger, require_writable=True)
            number = int(lib.store_adopt_client(store._handle, part, len(part)))
            if number < 0:
                ffi.release(part)
            else:
                store._ledgers[number] = part
            numbers.append(number if number >= 0 else None)
        lib.store_adopt_records(store._handle)
        return store, numbers

    def _begin(self, index: Any, handle: Any) -> None:
        if handle == ffi.NULL:
            ffi.release(index)
            raise MemoryError("not enough memory for the store's books")
        self._index = index
        self._handle = handle
        self.guard: AbstractContextManager[None] = contextlib.nullcontext()
        self._ledgers: dict[int, Any] = {}
        self._events = ffi.new("store_event[]", EVENTS_PER_TAKE)

    @property
    def handle(self) -> Any:
        """The C store, for the thread that serves clients."""
        return self._handle

    def close(self) -> None:
        """Free the books and let go of the mapped buffers."""
        if self._handle != ffi.NULL:
            lib.store_destroy(self._handle)
            self._handle = ffi.NULL
        for ledger in self._ledgers.values():
            ffi.release(ledger)
        self._ledgers.clear()
        ffi.release(self._index)

    @_guarded
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

    @_guarded
    def detach(self, client: int) -> None:
        """Forget a dead client: its pins, reservations and ledger."""
        lib.store_client_detach(self._handle, client)
        ffi.release(self._ledgers.pop(client))

    @_guarded
    def describe_client(self, client: int, process_id: int, name: str) -> None:
        """Note in a client's ledger who it is, for a daemon that adopts it."""
        lib.store_client_describe(self._handle, client, process_id % 2**32, name.encode()[:47])

    @_guarded
    def read_client(self, client: int) -> ClientFacts:
        """What an adopted client's ledger says of it.

        Raises:
            KeyError: when there is no such client.
        """
        facts = ffi.new("store_client_facts *")
        if not lib.store_client_read(self._handle, client, facts):
            raise KeyError(client)
        return ClientFacts(int(facts.token), int(facts.process_id), ffi.string(facts.name).decode(errors="replace"))

    @_guarded
    def resume(self, client: int, reservations: bytes) -> None:
        """An adopted client still writes to these reservations (packed u64) and to no other in quarantine."""
        lib.store_resume(self._handle, client, ffi.from_buffer("uint64_t[]", reservations), len(reservations) // 8)

    @_guarded
    def identify_class(self, class_id: int) -> ClassIdentity | None:
        """What a class id stands for."""
        facts = ffi.new("store_class_identity *")
        if not lib.store_class_identify(self._handle, class_id, facts):
            return None
        model = ffi.string(facts.model).decode(errors="replace")
        return ClassIdentity(bytes(ffi.buffer(facts.name_space)), int(facts.group), model)

    @_guarded
    def open_class(self, name_space: bytes, group: int, shard_bytes: Sequence[int], model: str) -> int:
        """Find or make the class of a (namespace, group); returns its id.

        Raises:
            StoreRefusedError: when the geometry differs from the known one or does not fit.
            ValueError: when the namespace is not 16 bytes.
        """
        if len(name_space) != 16:
            raise ValueError(f"a namespace has 16 bytes, not {len(name_space)}")
        if not 1 <= len(shard_bytes) <= lib.ARENA_SHARDS_MAX:
            raise StoreRefusedError(STATUS_TEXT[lib.STORE_TOO_LARGE])
        class_id = ffi.new("uint32_t *")
        status = lib.store_class_open(
            self._handle, name_space, group, len(shard_bytes), list(shard_bytes), model.encode()[:127], class_id
        )
        if status != lib.STORE_OK:
            raise StoreRefusedError(STATUS_TEXT.get(status, f"store status {status}"))
        return int(class_id[0])

    @_guarded
    def reserve(
        self, client: int, class_id: int, shard: int, retention: int, tenant_tag: int, wishes: bytes,
        now_ns: int, deadline_ns: int, ttl_s: int = 0,
    ) -> bytes:  # fmt: skip
        """Answer an array of `store_wish` with an array of `store_grant`, both as packed bytes."""
        count = len(wishes) // ffi.sizeof("store_wish")
        grants = ffi.new("store_grant[]", count)
        lib.store_reserve(
            self._handle, client, class_id, shard, ffi.new("store_terms *", (retention, ttl_s, tenant_tag)),
            ffi.from_buffer("store_wish[]", wishes), count, now_ns, deadline_ns, grants,
        )  # fmt: skip
        return bytes(ffi.buffer(grants))

    @_guarded
    def commit(self, client: int, commitments: bytes) -> bytes:
        """Publish an array of `store_commitment`; returns one u32 status each, packed."""
        count = len(commitments) // ffi.sizeof("store_commitment")
        statuses = ffi.new("uint32_t[]", count)
        lib.store_commit(self._handle, client, ffi.from_buffer("store_commitment[]", commitments), count, statuses)
        return bytes(ffi.buffer(statuses))

    @_guarded
    def give_up(self, client: int, reservations: bytes) -> None:
        """Give reservations (packed u64) back unused."""
        lib.store_give_up(self._handle, client, ffi.from_buffer("uint64_t[]", reservations), len(reservations) // 8)

    @_guarded
    def touch(self, class_id: int, keys: bytes) -> None:
        """Note that these records, in chain order, were useful."""
        lib.store_touch(self._handle, class_id, keys, len(keys) // KEY_BYTES)

    def verify(self, data: Any, class_id: int, keys: bytes) -> int:
        """Check records against their checksums, drop the damaged ones; returns how many those were.

        `data` is the mapped data file.
        """
        view = ffi.from_buffer(data)
        starts = range(0, len(keys), KEY_BYTES)
        statuses = []
        for start in starts:  # others get their turn between two records, which may be large
            with self.guard:
                statuses.append(lib.store_verify(self._handle, view, class_id, keys[start : start + KEY_BYTES]))
        ffi.release(view)
        return statuses.count(lib.STORE_DAMAGED)

    @_guarded
    def drop_class(self, class_id: int) -> int:
        """Drop all records of a class that nobody reads; returns how many."""
        return int(lib.store_drop_class(self._handle, class_id))

    @_guarded
    def set_quotas(self, namespace_bytes: int, tenant_bytes: int) -> None:
        """Set the most that one namespace, and one tenant, may take; 0 for no limit."""
        lib.store_set_quotas(self._handle, namespace_bytes, tenant_bytes)

    @_guarded
    def set_clock(self, now_s: int) -> None:
        """Set the wall clock, in seconds, by which records expire."""
        lib.store_set_clock(self._handle, now_s)

    @_guarded
    def set_retention(self, class_id: int, key: bytes | None, retention: int) -> int:
        """Give one present record of a class, or all, a retention class; returns how many have it now."""
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        return int(lib.store_set_retention(self._handle, class_id, ffi.NULL if key is None else key, retention))

    @_guarded
    def tenants(self) -> list[TenantUsage]:
        """Tenants that have records."""
        usages = ffi.new("store_tenant_usage[]", lib.STORE_TENANTS_MAX)
        found = lib.store_tenants(self._handle, ffi.new("uint64_t *"), usages, len(usages))
        return [TenantUsage(int(u.tag), int(u.bytes), int(u.records), bool(u.is_overflow)) for u in usages[0:found]]

    @_guarded
    def namespace_bytes(self, class_id: int) -> int:
        """Bytes of all records of the namespace a class belongs to."""
        return int(lib.store_namespace_bytes(self._handle, class_id))

    @_guarded
    def expire(self, now_ns: int, incomplete_max_ns: int) -> None:
        """Apply deadlines."""
        lib.store_expire(self._handle, now_ns, incomplete_max_ns)

    def take_events(self) -> tuple[list[StoreEvent], bool]:
        """Return pending events, runs of one kind joined, and whether some were lost before them.

        The lock is held only to take them out: making objects of thousands would keep clients waiting.
        """
        events: list[StoreEvent] = []
        any_lost = False
        lost = ffi.new("int *")
        while True:
            with self.guard:
                taken = lib.store_take_events(self._handle, self._events, EVENTS_PER_TAKE, lost)
            any_lost = any_lost or bool(lost[0])
            events.extend(self._joined(taken))
            if taken < EVENTS_PER_TAKE:
                return events, any_lost

    @_guarded
    def snapshot(self) -> list[StoreEvent]:
        """Return all present records."""
        cursor = ffi.new("uint64_t *")
        events: list[StoreEvent] = []
        while taken := lib.store_snapshot(self._handle, cursor, self._events, EVENTS_PER_TAKE):
            events += self._joined(taken)
        return events

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

    @_guarded
    def listing(self, class_ids: Sequence[int], cursor: int, limit: int) -> tuple[list[Listing], int | None]:
        """Up to `limit` records of some classes, from slot `cursor` on, and where to go on: None at the end.

        Walks a bounded number of slots, so a page may be short, even empty, before the end.
        """
        wanted = bytearray(lib.ARENA_CLASSES_MAX)
        for class_id in class_ids:
            wanted[class_id] = 1
        place = ffi.new("uint64_t *", cursor)
        listings = ffi.new("store_listing[]", limit)
        found = lib.store_list(self._handle, ffi.from_buffer(wanted), place, listings, limit)
        following = int(place[0])
        return [_listing(listings[i]) for i in range(found)], following if following < self._slots() else None

    @_guarded
    def class_facts(self, class_id: int) -> dict[str, int]:
        """How many records a class has, of how many bytes and shards each."""
        facts = ffi.new("store_class_usage *")
        lib.store_read_usage(self._handle, class_id, facts)
        return {
            "records": int(facts.records),
            "record_bytes": int(facts.record_bytes),
            "shards": int(facts.shard_count),
        }

    def _slots(self) -> int:
        return self.stats()["record_capacity"]

    @_guarded
    def stats(self) -> dict[str, int]:
        """Return the counters of `store_stats` by name."""
        stats = ffi.new("store_stats *")
        lib.store_read_stats(self._handle, stats)
        return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("store_stats").fields}

    @_guarded
    def audit(self) -> str | None:
        """Return None when all books add up, else what does not."""
        wrong = lib.store_audit(self._handle)
        return None if wrong == ffi.NULL else ffi.string(wrong).decode()


def _listing(entry: Any) -> Listing:
    return Listing(
        class_id=int(entry.class_id),
        key=bytes(ffi.buffer(entry.key)),
        depth_grains=int(entry.depth_grains),
        retention=int(entry.retention),
        expires_s=int(entry.expires_s),
        is_present=bool(entry.is_present),
        tenant_tag=int(entry.tenant_tag),
        shard_mask=int(entry.shard_mask),
        stored_bytes=int(entry.stored_bytes),
    )


def read_facts(index: Any, data_bytes: int) -> tuple[str | None, ArenaFacts]:
    """Why the index file in a buffer cannot be used with a data file of that size, or None; and its header."""
    facts = ffi.new("arena_facts *")
    buffer = ffi.from_buffer(index)
    status = lib.arena_read_facts(buffer, len(buffer), data_bytes, facts)
    ffi.release(buffer)
    refusal = {
        lib.ARENA_OK: None,
        lib.ARENA_BAD_MAGIC: "it was never finished, or is no arena",
        lib.ARENA_BAD_VERSION: (
            f"it has layout version {facts.layout_version}, this infera-kvd knows {lib.ARENA_LAYOUT_VERSION}"
        ),
        lib.ARENA_BAD_GEOMETRY: "the sizes in its header do not fit its files",
        lib.ARENA_BAD_CHECK: "its header is damaged",
    }[status]
    return refusal, ArenaFacts(
        bytes(ffi.buffer(facts.instance)), int(facts.generation), int(facts.data_bytes), int(facts.records),
        int(facts.shards_per_record),
    )  # fmt: skip


def index_bytes(records: int, shards_max: int, data_bytes: int) -> int:
    """Bytes of the index file for that many records (rounded up to a power of two)."""
    return int(lib.arena_index_bytes(records, shards_max, data_bytes))


def ledger_bytes(records: int) -> int:
    """Bytes of one client's ledger file."""
    return int(lib.arena_ledger_bytes(records))


def record_capacity(records: int) -> int:
    """Records the index really has room for."""
    return int(lib.arena_record_capacity(records))
