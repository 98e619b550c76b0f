"""The load table: what the router processes of one host have under way at each place, in memory they all map.

The C core (``csrc/loadtable.c``) keeps it; the ingest process makes it and gives each server a lane of its own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from infera_core import ffi, lib

LANES_MAX: Final = int(lib.LOADTABLE_LANES_MAX)
LANE_LIFE_S: Final = 2.0
"""What a process says counts for so long after its last beat: one that is stopped or killed is soon forgotten."""
BEAT_INTERVAL_S: Final = 0.5
_ROW: Final = Struct("3d")
assert ffi.sizeof("loadtable_load") == _ROW.size


class PlaceSum(NamedTuple):
    """What somebody has at one place: prompt tokens to be computed, requests, tokens in their contexts."""

    queued_tokens: float
    requests: float
    context_tokens: float


def place_number(incarnation: str, dp_rank: int) -> int:
    """The 64-bit name of a place, the same in every process; never 0."""
    digest = hashlib.blake2b(f"{incarnation}/{dp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class LoadTable:
    """The table as its maker holds it: claims and releases lanes, reads and writes any of them."""

    def __init__(self) -> None:
        """Raises OSError when there is no memory."""
        size_bytes = int(lib.loadtable_bytes())
        self.descriptor = os.memfd_create("infera-loadtable", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, size_bytes)
        self._bytes = ffi.from_buffer(self._memory, require_writable=True)
        lib.loadtable_create(self._bytes, size_bytes)

    def claim(self) -> int | None:
        """A lane for one more process; None when all are taken."""
        lane = int(lib.loadtable_claim(self._bytes))
        return lane if lane >= 0 else None

    def release(self, lane: int) -> None:
        """Empty the lane of a process that is gone."""
        lib.loadtable_release(self._bytes, lane)

    def lane(self, number: int) -> LoadLane:
        """A lane of this table, for use in this process."""
        return LoadLane(self._memory, number)

    def close(self) -> None:
        """The memory goes with the last process that maps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()


class LoadLane:
    """One process's lane, and its view of all others. Times are seconds of the host's monotonic clock, above 0."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        """Raises ValueError for memory that holds no load table of this version."""
        self._memory = memory
        self._bytes = ffi.from_buffer(memory, require_writable=True)
        if lib.loadtable_check(self._bytes, len(memory)) != lib.LOADTABLE_OK:
            raise ValueError("not a load table of this version")
        self.number = number
        self.refused_full = 0
        """Places that found no room in the lane: others do not see what we have there."""
        self._load = ffi.new("loadtable_load *")

    def put(self, place: int, load: PlaceSum, drainable_tokens: float, now_s: float) -> None:
        """Say what this process has at a place now, and how much of the queue can pass without another word of it."""
        own = self._load
        own.queued_tokens, own.requests, own.context_tokens = load
        if lib.loadtable_put(self._bytes, self.number, place, own, drainable_tokens, now_s) == lib.LOADTABLE_FULL:
            self.refused_full += 1

    def beat(self, now_s: float) -> None:
        """Say that this process is alive; without it the lane does not count."""
        lib.loadtable_beat(self._bytes, self.number, now_s)

    def others(self, places: Sequence[int], s_per_token: Sequence[float], now_s: float) -> list[PlaceSum]:
        """What all other live processes have at each place; their queues drain at ``s_per_token``."""
        count = len(places)
        names = ffi.new("uint64_t[]", list(places))
        speeds = ffi.new("double[]", list(s_per_token))
        sums = ffi.new("loadtable_load[]", count)
        lib.loadtable_sum(self._bytes, self.number, names, speeds, count, now_s, LANE_LIFE_S, sums)
        return [PlaceSum._make(row) for row in _ROW.iter_unpack(ffi.buffer(sums))]

    def live_count(self, now_s: float) -> int:
        """Processes that share their loads now, this one included."""
        return int(lib.loadtable_live(self._bytes, now_s, LANE_LIFE_S))


def map_whole(descriptor: int) -> mmap.mmap:
    """The memory of a table made elsewhere; the descriptor may be closed afterwards. Raises ValueError, OSError."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
