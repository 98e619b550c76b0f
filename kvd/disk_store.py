"""Typed entrance to the C disk store (see `csrc/disk_store.h`)."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infera_core import ffi, lib

KEY_BYTES = 16
UNIT_BYTES: int = lib.DISK_UNIT_BYTES
DEVICES_MAX: int = lib.DISK_DEVICES_MAX
CLASSES_MAX: int = lib.DISK_CLASSES_MAX
ENTRY_BYTES = 56 + 4
"""Memory of one index entry with its share of the buckets."""
COMPLETIONS_PER_TAKE = 256
EVENTS_PER_TAKE = 4096


class DiskStatus(enum.IntEnum):
    """What becomes of a put or get; see `disk_status` in the header."""

    OK = lib.DISK_OK
    ABSENT = lib.DISK_ABSENT
    EXISTS = lib.DISK_EXISTS
    BUSY = lib.DISK_BUSY
    NOT_WANTED = lib.DISK_NOT_WANTED
    TOO_LARGE = lib.DISK_TOO_LARGE
    INDEX_FULL = lib.DISK_INDEX_FULL
    OVER_QUOTA = lib.DISK_OVER_QUOTA
    OVER_BUDGET = lib.DISK_OVER_BUDGET
    UNAVAILABLE = lib.DISK_UNAVAILABLE
    CLASSES_FULL = lib.DISK_CLASSES_FULL
    BAD_REQUEST = lib.DISK_BAD_REQUEST
    DAMAGED = lib.DISK_DAMAGED
    FAILED = lib.DISK_FAILED
    LATE = lib.DISK_LATE
    RELEASED = lib.DISK_RELEASED


class DiskState(enum.IntEnum):
    """Whether a device serves."""

    STARTING = lib.DISK_STARTING
    ON = lib.DISK_ON
    READ_ONLY = lib.DISK_READ_ONLY
    OFF = lib.DISK_OFF


class DiskWay(enum.IntEnum):
    """Whether something is used: found out, insisted on, or not."""

    PROBE = lib.DISK_WAY_PROBE
    YES = lib.DISK_WAY_YES
    NO = lib.DISK_WAY_NO


class DiskStoreError(Exception):
    """The store cannot be opened as asked; the text says why and what helps."""


@dataclass(frozen=True)
class DiskSettings:
    """What a store needs to know. Sizes in bytes, 0 where the header says "0": chosen, or no limit."""

    size_bytes: int
    segment_bytes: int = 0
    free_floor_bytes: int = 0
    day_bytes: int = 0
    namespace_bytes: int = 0
    entries: int = 1 << 20
    depth: int = 32
    deadline_ms: int = 0
    sync_ms: int = 0
    ring: DiskWay = DiskWay.PROBE
    direct: DiskWay = DiskWay.PROBE


@dataclass(frozen=True)
class DiskObject:
    """One shard of a record. `sum` is the arena's checksum of its bytes; `retention` a class number, 1 to 4;
    `expires_s` in seconds since 1970, 0 for never."""

    class_id: int
    key: bytes
    shard: int
    length_bytes: int
    sum: int
    retention: int
    expires_s: int = 0
    depth_grains: int = 0
    tenant_tag: int = 0


@dataclass(frozen=True)
class DiskCompletion:
    """A put or get that is over. `object` is what the record's head says, when a get is OK."""

    token: int
    is_put: bool
    status: DiskStatus
    object: DiskObject


@dataclass(frozen=True)
class DiskEvent:
    """Records of one class that became present on disk or went away. `keys` is n times 16 bytes."""

    class_id: int
    is_removed: bool
    keys: bytes


@dataclass(frozen=True)
class DiskDevice:
    """A folder and how it fares. `reason` says why it is not on and what helps."""

    path: str
    state: DiskState
    reason: str
    way: str
    segments: int
    segment_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class DiskClass:
    """What a class number of the disk store stands for, and how much of it there is."""

    namespace: bytes
    group: int
    shard_count: int
    model: str
    objects: int
    object_bytes: int


class DiskStore:
    """The store over one or more folders. One thread calls in; nothing here waits for a device.

    What was given to `put` and `get` must stay alive until the completion; a buffer of a `get` that is LATE until
    RELEASED.
    """

    def __init__(self, paths: Sequence[Path], settings: DiskSettings) -> None:
        """Open folders, which are made if need be, and begin to load them.

        Raises:
            DiskStoreError: when the settings make no sense, or memory is short.
        """
        texts = [ffi.new("char[]", str(path.absolute()).encode()) for path in paths]
        filled = ffi.new("disk_settings *")
        for name in DiskSettings.__dataclass_fields__:
            setattr(filled, name, getattr(settings, name))
        error = ffi.new("char[256]")
        seed = [secrets.randbits(64), secrets.randbits(64)]
        self._handle = lib.disk_open(filled, texts, len(texts), seed, error, len(error))
        if self._handle == ffi.NULL:
            raise DiskStoreError(f"cannot open the disk tier: {ffi.string(error).decode(errors='replace')}")
        self._completions = ffi.new("disk_completion[]", COMPLETIONS_PER_TAKE)
        self._events = ffi.new("disk_event[]", EVENTS_PER_TAKE)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Sync and close. False when a device hangs: then buffers of gets and puts may never be freed."""
        handle, self._handle = self._handle, ffi.NULL
        return handle == ffi.NULL or bool(lib.disk_close(handle, round(timeout_s * 1000)))

    @property
    def descriptor(self) -> int:
        """Becomes readable when `poll` has something to do."""
        return int(lib.disk_descriptor(self._handle))

    def poll(self, now_ns: int | None = None, now_s: int | None = None) -> None:
        """Go on with everything; `now_ns` is a clock that never goes back, `now_s` the wall's."""
        lib.disk_poll(
            self._handle,
            time.monotonic_ns() if now_ns is None else now_ns,
            int(time.time()) if now_s is None else now_s,
        )

    @property
    def is_loaded(self) -> bool:
        """Whether no folder is being loaded any more."""
        return bool(lib.disk_is_loaded(self._handle))

    def open_class(self, namespace: bytes, group: int, shard_count: int, model: str) -> int:
        """Find or make the class of a (namespace, group); returns its number.

        Raises:
            DiskStoreError: when all numbers are taken, or the class has another number of shards.
        """
        if len(namespace) != 16:
            raise ValueError(f"a namespace has 16 bytes, not {len(namespace)}")
        number = int(lib.disk_class(self._handle, namespace, group, shard_count, model.encode()[:127]))
        if number < 0:
            raise DiskStoreError(
                f"no disk class for {shard_count} shards: it exists with another count, or {CLASSES_MAX} are in use"
            )
        return number

    def classes(self) -> dict[int, DiskClass]:
        """All classes by number."""
        found = {}
        facts = ffi.new("disk_class_facts *")
        for number in range(CLASSES_MAX):
            if lib.disk_class_read(self._handle, number, facts):
                model = ffi.string(facts.model).decode(errors="replace")
                found[number] = DiskClass(
                    bytes(ffi.buffer(facts.name_space)), int(facts.group), int(facts.shard_count), model,
                    int(facts.objects), int(facts.object_bytes),
                )  # fmt: skip
        return found

    def put(self, item: DiskObject, address: int, token: int) -> DiskStatus:
        """Begin to write an object whose bytes are at `address`, a multiple of 4 KiB."""
        described = ffi.new("disk_object *")
        for name in DiskObject.__dataclass_fields__:
            setattr(described, name, getattr(item, name))
        return DiskStatus(lib.disk_put(self._handle, described, ffi.cast("void *", address), token))

    def get(
        self, class_id: int, key: bytes, shard: int, address: int, capacity: int, deadline_s: float, token: int
    ) -> DiskStatus:
        """Begin to read one into `capacity` bytes at `address`, both multiples of 4 KiB."""
        deadline_ms = round(deadline_s * 1000)
        target = ffi.cast("void *", address)
        return DiskStatus(lib.disk_get(self._handle, class_id, key, shard, target, capacity, deadline_ms, token))

    def completions(self) -> list[DiskCompletion]:
        """What is over since the last call."""
        found: list[DiskCompletion] = []
        while count := lib.disk_take_completions(self._handle, self._completions, COMPLETIONS_PER_TAKE):
            found.extend(_completion(self._completions[i]) for i in range(count))
        return found

    def find_run(self, class_id: int, keys: bytes) -> int:
        """How many of the leading keys have all their shards on disk."""
        return int(lib.disk_find_run(self._handle, class_id, keys, len(keys) // KEY_BYTES))

    def length(self, class_id: int, key: bytes, shard: int) -> int:
        """Bytes of a shard on disk; 0 when it is not there."""
        return int(lib.disk_length(self._handle, class_id, key, shard))

    def drop_class(self, class_id: int) -> int:
        """Forget all records of a class, for good; returns how many shards those were."""
        return int(lib.disk_drop_class(self._handle, class_id))

    def take_events(self) -> tuple[list[DiskEvent], bool]:
        """Pending events, runs of one kind joined, and whether some were lost before them."""
        events: list[DiskEvent] = []
        any_lost = False
        lost = ffi.new("int *")
        while True:
            count = int(lib.disk_take_events(self._handle, self._events, EVENTS_PER_TAKE, lost))
            any_lost = any_lost or bool(lost[0])
            events.extend(self._joined(count))
            if count < EVENTS_PER_TAKE:
                return events, any_lost

    def snapshot(self) -> list[DiskEvent]:
        """All present records."""
        cursor = ffi.new("uint64_t *")
        events: list[DiskEvent] = []
        while count := int(lib.disk_snapshot(self._handle, cursor, self._events, EVENTS_PER_TAKE)):
            events += self._joined(count)
        return events

    def _joined(self, count: int) -> list[DiskEvent]:
        joined: list[DiskEvent] = []
        keys = bytearray()
        for i in range(count):
            event = self._events[i]
            keys += ffi.buffer(event.key)
            following = self._events[i + 1] if i + 1 < count else None
            if following is None or following.class_id != event.class_id or following.is_removed != event.is_removed:
                joined.append(DiskEvent(int(event.class_id), bool(event.is_removed), bytes(keys)))
                keys.clear()
        return joined

    def stats(self) -> dict[str, int]:
        """The counters of `disk_stats` by name."""
        stats = ffi.new("disk_stats *")
        lib.disk_read_stats(self._handle, stats)
        return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("disk_stats").fields}

    def devices(self) -> list[DiskDevice]:
        """All folders, in the order they were named."""
        found = []
        facts = ffi.new("disk_device_facts *")
        for number in range(lib.disk_device_count(self._handle)):
            lib.disk_read_device(self._handle, number, facts)
            found.append(
                DiskDevice(
                    path=_text(facts.path),
                    state=DiskState(facts.state),
                    reason=_text(facts.reason),
                    way=_text(facts.way),
                    segments=int(facts.segments),
                    segment_bytes=int(facts.segment_bytes),
                    free_bytes=int(facts.free_bytes),
                )
            )
        return found

    def audit(self) -> str | None:
        """None when all books add up, else what does not."""
        wrong = lib.disk_audit(self._handle)
        return None if wrong == ffi.NULL else ffi.string(wrong).decode()


def _text(field: Any) -> str:
    text: bytes = ffi.string(field)
    return text.decode(errors="replace")


def _completion(done: Any) -> DiskCompletion:
    item = done.object
    return DiskCompletion(
        token=int(done.token),
        is_put=bool(done.is_put),
        status=DiskStatus(done.status),
        object=DiskObject(
            class_id=int(item.class_id),
            key=bytes(ffi.buffer(item.key)),
            shard=int(item.shard),
            length_bytes=int(item.length_bytes),
            sum=int(item.sum),
            retention=int(item.retention),
            expires_s=int(item.expires_s),
            depth_grains=int(item.depth_grains),
            tenant_tag=int(item.tenant_tag),
        ),
    )
