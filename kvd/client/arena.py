"""One mapped arena: look-ups and pins without leaving the process."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from infera_core import ffi, lib

KEY_BYTES = 16
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
class PinnedRecord:
    """Where one pinned record lies: byte offset in the data file, its size and its index slot."""

    offset_bytes: int
    size_bytes: int
    slot: int


class Arena:
    """The three files of one daemon instance, mapped. Stays valid after the daemon is gone.

    Takes ownership of the descriptors. Raises ArenaError when a header is refused.
    """

    def __init__(self, instance: str, index: int, data: int, ledger: int) -> None:
        self.instance = instance
        try:
            self._index = mmap.mmap(index, 0, prot=mmap.PROT_READ)
            self._data = mmap.mmap(data, 0)
            self._ledger = mmap.mmap(ledger, 0)
        finally:
            for descriptor in (index, data, ledger):
                os.close(descriptor)
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

    def probe_run(self, class_id: int, full_mask: int, keys: bytes) -> int:
        """Number of leading keys whose record is present with all its shards. No side effect."""
        return int(lib.arena_probe_run(self._view, class_id, full_mask, keys, len(keys) // KEY_BYTES, ffi.NULL))

    def present(self, class_id: int, full_mask: int, keys: bytes) -> bytes:
        """One byte, 0 or 1, for each key."""
        out = bytearray(len(keys) // KEY_BYTES)
        if out:
            lib.arena_probe_each(self._view, class_id, full_mask, keys, len(out), ffi.from_buffer(out))
        return bytes(out)

    def pin(self, class_id: int, full_mask: int, key: bytes) -> PinnedRecord | None:
        """Pin one record; None when it is not present (any more). Needs an `unpin` of its slot."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a content key has {KEY_BYTES} bytes, not {len(key)}")
        extent = ffi.new("arena_extent *")
        if not lib.arena_pin(self._view, class_id, full_mask, key, extent):
            return None
        return PinnedRecord(int(extent.offset_bytes), int(extent.size_bytes), int(extent.slot))

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

    def unpin(self, slot: int) -> None:
        """Give one pin back."""
        lib.arena_unpin(self._view, slot)

    def shard_sum(self, slot: int, shard: int) -> int:
        """Checksum committed for a shard of a pinned record."""
        return int(lib.arena_shard_sum(self._view, slot, shard))

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
