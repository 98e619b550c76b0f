"""One client that saves and loads blocks, as an engine's worker does."""

from __future__ import annotations

import mmap
import os
from array import array
from pathlib import Path

from infera_core import ffi, lib

from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier, Segment


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))


def prefaulted(size_bytes: int, *, is_shared: bool) -> mmap.mmap:
    """Memory every page of which is there: shared as an arena is, or private as an engine's."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE))
    error = lib.memory_prefault(ffi.from_buffer(memory), size_bytes)
    if error:
        raise OSError(error, os.strerror(error))
    return memory


class Mover:
    """A client with memory of its own, `blocks` blocks of `block_bytes`. Keys are numbers, made unique by `seed`."""

    def __init__(self, socket_path: Path, block_bytes: int, blocks: int, seed: int) -> None:
        self.block_bytes, self.blocks = block_bytes, blocks
        self.memory = prefaulted(block_bytes * blocks, is_shared=False)
        self.address = address_of(self.memory)
        self._seed = seed
        namespace = block_bytes.to_bytes(16, "little")
        self.spec = RecordSpec(namespace, 0, (block_bytes,), "bench")
        self.client = KvdClient(socket_path, f"bench-{seed}", [self.spec], saves_shard=0)
        self.client.start()
        self.copier = CpuCopier([Segment(self.address, block_bytes, block_bytes)])

    def keys(self, first: int, count: int) -> bytes:
        """Content keys of consecutive numbers."""
        return array("Q", [word for n in range(first, first + count) for word in (n, self._seed)]).tobytes()

    def blocks_for(self, first: int, count: int) -> range:
        """Blocks that records `first` to `first + count` come from and go to, round and round."""
        start = first % (self.blocks - count + 1)
        return range(start, start + count)

    def put(self, first: int, count: int) -> int:
        """Save a batch; returns how many were accepted."""
        depths = range(1, count + 1)
        return self.client.put(
            self.spec, 0, self.keys(first, count), depths, self.copier, self.blocks_for(first, count)
        )

    def get(self, first: int, count: int) -> int:
        """Load a batch; returns how many arrived and were right."""
        run = self.client.pin_run(self.spec, self.keys(first, count))
        if run is None:
            return 0
        try:
            places = [run.arena.locate(slot, 0) for slot in run.slots]
            addresses = [run.arena.data_address + place.offset_bytes for place in places if place]
            sums = self.copier.load(self.blocks_for(first, len(addresses)), addresses)
            return sum(place is not None and place.checksum == got for place, got in zip(places, sums, strict=False))
        finally:
            run.release()

    def close(self) -> None:
        """Leave."""
        self.client.close()
