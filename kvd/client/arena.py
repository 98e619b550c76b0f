"""One mapped arena: look-ups and pins without leaving the process."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infera_core import ffi, lib

from kvd.client.lock import LedgerLock

KEY_BYTES = 16
TOUCHES_MAX = 2048
"""Records of one run whose use is told: half of what the ring holds."""
POPULATE_CHUNK_BYTES = 8 << 20
"""Mapped in one go: a few milliseconds during which the process cannot change its mappings."""

_REFUSALS = {
    lib.ARENA_BAD_MAGIC: "it is not an arena",
    lib.ARENA_BAD_VERSION: "it has another layout version; install the same Infera version on both sides",
    lib.ARENA_BAD_GEOMETRY: "the sizes in its header do not fit",
    lib.ARENA_BAD_CHECK: "its header is damaged",
}


class ArenaError(Exception):
    """The files received cannot be used; the text says why."""


@dataclass(frozen=True)
class Location:
    """Where one shard of a pinned record lies in the data file, and the checksum it was committed with.

    `size_bytes` is that of the extent: the shard's, rounded up to 4 KiB.
    """

    offset_bytes: int
    size_bytes: int
    checksum: int


class PutFacts:
    """What the saves of one (class, shard) have in common; made once for each copier, used by one thread.

    Holds C arrays that grow to the largest batch, because making them costs more than a small copy.
    """

    def __init__(
        self, class_id: int, shard: int, segments: tuple[Any, Any, Any, int], *,
        flags: int = lib.STORE_RETAIN_SHORT, ttl_s: int = 0, tenant_tag: int = 0,
    ) -> None:  # fmt: skip
        self.segments = segments
        self._facts = ffi.new("ring_put_facts *")
        self._facts.class_id, self._facts.shard = class_id, shard
        self._facts.flags, self._facts.ttl_s, self._facts.tenant_tag = flags, ttl_s, tenant_tag

        self._depths = ffi.new("uint32_t[]", 1)
        self._blocks = ffi.new("uint64_t[]", 1)

    def for_ring(self, doorbell: int) -> Any:
        """The C struct, with the daemon's doorbell."""
        self._facts.doorbell = doorbell
        return self._facts

    def batch(self, depths_grains: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, Any]:
        """The two as C arrays, valid until the next call."""
        count = len(block_ids)
        if count > len(self._blocks):
            self._depths, self._blocks = ffi.new("uint32_t[]", count), ffi.new("uint64_t[]", count)
        if count == 1:
            self._depths[0], self._blocks[0] = depths_grains[0], block_ids[0]
        else:
            self._depths[0:count], self._blocks[0:count] = depths_grains, block_ids
        return self._depths, self._blocks


class Arena:
    """The three files of one daemon instance, mapped. Stays valid after the daemon is gone.

    Takes ownership of the descriptors. Raises ArenaError when a header is refused.
    """

    def __init__(
        self, instance: str, index: int, data: int, ledger: int, doorbell: int | None = None, lock: int | None = None
    ) -> None:
        self.instance = instance
        self._doorbell = doorbell
        try:
            self._lock = None if lock is None else LedgerLock(lock)
            try:
                self._map(index, data, ledger)
            except BaseException:
                if self._lock is not None:
                    self._lock.close()  # before the connection: the daemon takes who holds it for a user of the arena
                raise
        finally:
            for descriptor in (index, data, ledger):
                os.close(descriptor)

    def _map(self, index: int, data: int, ledger: int) -> None:
        self._index = mmap.mmap(index, 0, prot=mmap.PROT_READ)
        self._data = mmap.mmap(data, 0)
        self._ledger = mmap.mmap(ledger, 0)
        # The buffers keep the mappings alive as long as anybody holds this object.
        self._buffers = [ffi.from_buffer(part) for part in (self._index, self._data, self._ledger)]
        self.data_address = int(ffi.cast("uintptr_t", self._buffers[1]))
        self.data_bytes = len(self._data)
        status = ffi.new("int *")
        view = lib.arena_view_open(
            self._buffers[0], len(self._index), self._buffers[1], len(self._data), self._buffers[2],
            len(self._ledger), status,
        )  # fmt: skip
        if view == ffi.NULL:
            raise ArenaError(f"infera-kvd's arena is refused: {_REFUSALS.get(status[0], 'out of memory')}")
        self._view: Any = ffi.gc(view, lib.arena_view_close)

    def take_doorbell(self, doorbell: int) -> None:
        """Ring this one from now on: the daemon was started anew. Safe beside saves in other threads."""
        if self._doorbell is None:
            self._doorbell = doorbell
        else:
            os.dup2(doorbell, self._doorbell, inheritable=False)
            os.close(doorbell)

    def probe_run(self, class_id: int, full_mask: int, keys: bytes) -> int:
        """Number of leading keys whose record is present with all its shards. No side effect."""
        return int(lib.arena_probe_run(self._view, class_id, full_mask, keys, len(keys) // KEY_BYTES, ffi.NULL))

    def present(self, class_id: int, full_mask: int, keys: bytes) -> bytes:
        """One byte, 0 or 1, for each key."""
        out = bytearray(len(keys) // KEY_BYTES)
        if out:
            lib.arena_probe_each(self._view, class_id, full_mask, keys, len(out), ffi.from_buffer(out))
        return bytes(out)

    def pin_run(self, class_id: int, full_mask: int, keys: bytes) -> list[int]:
        """Pin the leading records of `keys` that are (still) present; returns their index slots.

        Each needs an `unpin`.

        Raises:
            ValueError: when `keys` is not a whole number of keys.
        """
        if len(keys) % KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes each; {len(keys)} bytes are not a whole number of them")
        slots = ffi.new("uint32_t[]", len(keys) // KEY_BYTES)
        pinned = lib.arena_pin_run(self._view, class_id, full_mask, keys, len(slots), slots)
        return list(ffi.unpack(slots, pinned))

    def locate(self, slot: int, shard: int) -> Location | None:
        """Where a shard of a pinned record lies; None when the index holds nonsense there."""
        found = ffi.new("arena_location *")
        if not lib.arena_locate(self._view, slot, shard, found):
            return None
        return Location(int(found.offset_bytes), int(found.size_bytes), int(found.sum))

    def change_count(self) -> int:
        """A number that changes with every record stored or removed: until then old answers hold."""
        return int(lib.arena_change_count(self._view))

    def change_counter(self) -> Callable[[], int]:
        """`change_count` as a function that costs as little as a call can. Valid while this object is."""
        return functools.partial(lib.arena_change_count, self._view)

    def removed_count(self) -> int:
        """How many records were ever removed: while it stays the same, what was found is still there."""
        return int(lib.arena_removed_count(self._view))

    def ask_again(self, questions: Any, count: int, were_removed: bool, whole_keys_max: int, turn: Any) -> None:
        """Bring the first `count` of a C array of `arena_question` up to date; see csrc/arena.h."""
        lib.arena_ask_again(self._view, questions, count, were_removed, whole_keys_max, turn)

    def populate_in_background(self) -> None:
        """Enter all pages in this process's page tables, from a thread that ends with this object.

        The pages exist, but a first touch through a new mapping costs a page fault each, several
        times the copy itself. Nothing depends on it: what fails is left to the faults.
        """
        threading.Thread(target=_populate, args=(weakref.ref(self),), name="infera-kvd-map", daemon=True).start()

    def _populate_chunk(self, part: int, offset: int) -> bool:
        """Do one chunk of file `part`; returns whether there is more to do in it."""
        buffer = self._buffers[part]
        size = min(POPULATE_CHUNK_BYTES, len(buffer) - offset)
        is_writable = part != 0
        return lib.memory_populate(buffer + offset, size, is_writable) == 0 and offset + size < len(buffer)

    def put(self, facts: PutFacts, keys: bytes, depths_grains: Sequence[int], block_ids: Sequence[int]) -> int:
        """Save blocks from stock, without asking the daemon; returns how many of the leading ones were.

        The rest found no stock or no room in the ring: ask over the socket. Safe from several threads,
        each with its own `facts`.

        Raises:
            ValueError: when the three are not as many.
        """
        if len(depths_grains) != len(block_ids) or len(keys) != KEY_BYTES * len(block_ids):
            raise ValueError(f"{len(keys)} bytes of keys, {len(depths_grains)} depths, {len(block_ids)} blocks")
        c_facts = facts.for_ring(-1 if self._doorbell is None else self._doorbell)
        depths, blocks = facts.batch(depths_grains, block_ids)
        base, stride, size, count = facts.segments
        return int(lib.ring_put(self._view, c_facts, keys, depths, base, stride, size, count, blocks, len(block_ids)))

    def touch(self, class_id: int, keys: bytes, most: int = TOUCHES_MAX, *, rings: bool = True) -> int:
        """Leave word that these records, in chain order, were useful; returns of how many.

        Of more than `most` some are chosen, others each time. Never waits, leaves half of the ring to saves,
        and without `rings` makes no system call: the daemon finds it when it looks next, within half a second.
        """
        bell = self._doorbell if rings and self._doorbell is not None else -1
        return int(lib.ring_touch(self._view, class_id, bell, keys, len(keys) // KEY_BYTES, most))

    def __del__(self) -> None:
        if self._doorbell is not None:
            os.close(self._doorbell)

    def unpin(self, slot: int) -> None:
        """Give one pin back."""
        lib.arena_unpin(self._view, slot)

    def pins_held(self) -> int:
        """Pins of this process: 0 when nothing leaked."""
        return int(lib.arena_pins_held(self._view))


def _populate(reference: weakref.ref[Arena]) -> None:
    """Body of the thread: index and ledger first, they are small and asked at every step."""
    for part in (0, 2, 1):
        offset = 0
        while (arena := reference()) is not None and arena._populate_chunk(part, offset):
            offset += POPULATE_CHUNK_BYTES
            del arena
