"""Moving whole blocks between an engine's tensors and the arena, checksummed on the way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infera_core import ffi, lib

if TYPE_CHECKING:
    from kvd.client.arena import Arena


@dataclass(frozen=True)
class Segment:
    """One region that holds a part of every block, such as a layer's tensor.

    Block `b` is the `size_bytes` bytes at `address + b * stride_bytes`.
    """

    address: int
    stride_bytes: int
    size_bytes: int


class BlockCopier(Protocol):
    """Copies blocks, in host memory (`CpuCopier`) or a device's (`DeviceCopier`). Addresses are in this process."""

    object_bytes: int

    def prepare(self, arena: Arena) -> None:
        """Copies will go to and come from this arena. Cheap when it is the one of the last time."""

    def mark(self) -> object:
        """A point in the engine's work so far. Called by the thread that gives the engine its work."""

    def save(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = None) -> list[int]:
        """Copy each block to its contiguous object, not before the work up to a mark is done; returns the checksums
        of the bytes copied."""

    def load(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = None) -> list[int]:
        """Copy each object into its block, likewise; returns the checksums of the bytes delivered."""


class CpuCopier:
    """The copier for tensors in host memory: one C call for a batch, without the GIL.

    An object is the concatenation of its segments in the order given.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise ValueError("a block has at least one segment")
        self.object_bytes = sum(segment.size_bytes for segment in segments)
        self._count = len(segments)
        self._base = ffi.new("uint64_t[]", [segment.address for segment in segments])
        self._stride = ffi.new("uint64_t[]", [segment.stride_bytes for segment in segments])
        self._bytes = ffi.new("uint64_t[]", [segment.size_bytes for segment in segments])

    @property
    def segments(self) -> tuple[Any, Any, Any, int]:
        """C arrays of addresses, strides and sizes, and their length: for saving in one call."""
        return self._base, self._stride, self._bytes, self._count

    def prepare(self, arena: Arena) -> None:
        """Nothing to do: both sides are memory of this process."""

    def mark(self) -> object:
        """None: an engine's work in host memory is done when it returns."""
        return None

    def save(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = None) -> list[int]:
        """See BlockCopier."""
        return self._copy(lib.copy_blocks_gather, block_ids, addresses)

    def load(self, block_ids: Sequence[int], addresses: Sequence[int], after: object = None) -> list[int]:
        """See BlockCopier."""
        return self._copy(lib.copy_blocks_scatter, block_ids, addresses)

    def _copy(self, function: object, block_ids: Sequence[int], addresses: Sequence[int]) -> list[int]:
        if len(block_ids) != len(addresses):
            raise ValueError(f"{len(block_ids)} blocks but {len(addresses)} objects")
        if not block_ids:
            return []
        assert callable(function)
        blocks = ffi.from_buffer("uint64_t[]", array("Q", block_ids))
        objects = ffi.from_buffer("uint64_t[]", array("Q", addresses))
        sums = ffi.new("uint64_t[]", len(block_ids))
        function(self._base, self._stride, self._bytes, self._count, blocks, objects, len(block_ids), sums)
        return list(sums)
