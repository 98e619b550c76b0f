"""The copier for tensors on a device: batched copies between its memory and the arena, without a buffer in between.

What a device can do stands behind `Device`, so that everything else here runs, and is tested, with host memory.

A checksum is that of the bytes in the arena: taken after a save's copy has landed, and before a load's copy begins,
from memory that is pinned and that nobody writes to. What the bus does to bytes on their way to the device is not
looked at; doing so would take a kernel there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from infera_core import ffi, lib

from kvd.client.arena import Arena
from kvd.client.copier import Segment

NOTHING_BEFORE: Final = None


class Device(Protocol):
    """Memory that only its own engine can copy to and from. Called from several threads."""

    descriptors_max: int
    """Copies that one call may hold."""

    def mark(self) -> object:
        """A point in the work given to the device so far, by the thread that gives it."""

    def register(self, address: int, size_bytes: int) -> None:
        """Host memory that copies will use from now on, in place of what was named before."""

    def copy(
        self, sources: array[int], targets: array[int], sizes: array[int], *, to_device: bool, after: object
    ) -> None:
        """Copy all, not before the work up to the mark `after` is done; returns when they are over."""


class DeviceCopier:
    """Whole blocks between a device's tensors and objects in the arena. See `BlockCopier`."""

    def __init__(self, segments: Sequence[Segment], device: Device) -> None:
        if not segments:
            raise ValueError("a block has at least one segment")
        self.object_bytes = sum(segment.size_bytes for segment in segments)
        self._segments = list(segments)
        self._device = device

    def prepare(self, arena: Arena) -> None:
        """Copies will go to and come from this arena."""
        self._device.register(arena.data_address, arena.data_bytes)

    def mark(self) -> object:
        """See `Device.mark`."""
        return self._device.mark()

    def save(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = NOTHING_BEFORE) -> list[int]:
        """Copy each block to its object; returns the checksums of the bytes that arrived."""
        self._copy(block_ids, addresses, to_device=False, after=after)
        return [self._sum(address) for address in addresses]

    def load(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = NOTHING_BEFORE) -> list[int]:
        """Copy each object into its block; returns the checksums of the bytes that were sent."""
        sums = [self._sum(address) for address in addresses]
        self._copy(block_ids, addresses, to_device=True, after=after)
        return sums

    def _sum(self, address: int) -> int:
        return int(lib.checksum_bytes(ffi.cast("void *", address), self.object_bytes))

    def _copy(self, block_ids: Sequence[int], addresses: Sequence[int], *, to_device: bool, after: object) -> None:
        if len(block_ids) != len(addresses):
            raise ValueError(f"{len(block_ids)} blocks but {len(addresses)} objects")
        blocks, objects, sizes = array("q"), array("q"), array("q")
        for block_address, object_address, size in self._descriptors(block_ids, addresses):
            blocks.append(block_address)
            objects.append(object_address)
            sizes.append(size)
        for start in range(0, len(sizes), self._device.descriptors_max):
            part = slice(start, start + self._device.descriptors_max)
            sources, targets = (objects, blocks) if to_device else (blocks, objects)
            self._device.copy(sources[part], targets[part], sizes[part], to_device=to_device, after=after)

    def _descriptors(self, block_ids: Sequence[int], addresses: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Address in the device, address in the arena, and bytes of each part of each block."""
        for block_id, address in zip(block_ids, addresses, strict=True):
            for segment in self._segments:
                yield segment.address + block_id * segment.stride_bytes, address, segment.size_bytes
                address += segment.size_bytes
