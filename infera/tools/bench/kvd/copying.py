"""Puts and gets against memcpy of the same sizes, in turn, over more memory than the caches hold."""

from __future__ import annotations

import statistics
import time
from array import array
from dataclasses import dataclass, field

from infera.tools.bench.kvd.bare import Bare
from infera.tools.bench.kvd.daemon import BenchDaemon
from infera.tools.bench.kvd.mover import Mover, address_of, prefaulted

LARGE_BYTES, LARGE_BATCH = 1 << 20, 16
SMALL_BYTES, SMALL_PUTS = 64 << 10, 64
WORKING_SET_BYTES = 256 << 20
ARENA_BYTES = 1 << 30
REREAD_DISTANCE = 64
"""What is read was written so many blocks ago. With the copies in between, three times that has gone through the
caches; further back, eviction may rightly have given up what nobody had read."""


@dataclass
class Samples:
    """Seconds of each kind, one a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    moved_bytes: int = 0
    daemon_cpu_s: float = 0.0
    failed: int = 0

    def add(self, kind: str, started_s: float) -> None:
        """Note what has just ended."""
        self.seconds.setdefault(kind, []).append(time.perf_counter() - started_s)

    def median_s(self, kind: str) -> float:
        """The middle one."""
        return statistics.median(self.seconds[kind])


class PlainMemory:
    """Where plain copies go to and come from: shared memory, as an arena is, already there."""

    def __init__(self, bare: Bare, mover: Mover, bytes_each: int) -> None:
        self._bare, self._mover, self._size = bare, mover, bytes_each
        self._memory = prefaulted(WORKING_SET_BYTES, is_shared=True)
        self._address = address_of(self._memory)
        self._blocks = WORKING_SET_BYTES // bytes_each

    def copy(self, first: int, count: int, *, is_in: bool) -> None:
        """Copy `count` blocks into this memory or out of it."""
        start = first % (self._blocks - count + 1)
        here = array("Q", [self._address + i * self._size for i in range(start, start + count)])
        there = array("Q", [self._mover.address + i * self._size for i in self._mover.blocks_for(first, count)])
        self._bare.copy(*((here, there) if is_in else (there, here)), self._size)


def measure_large(daemon: BenchDaemon, bare: Bare, rounds: int) -> Samples:
    """Batches of 16 blocks of 1 MiB. The arena is full before it begins, so every put evicts."""
    mover = Mover(daemon.socket, LARGE_BYTES, WORKING_SET_BYTES // LARGE_BYTES, seed=1)
    plain = PlainMemory(bare, mover, LARGE_BYTES)
    samples = Samples()
    number = 0
    for number in range(0, 2 * ARENA_BYTES // LARGE_BYTES, LARGE_BATCH):
        mover.put(number, LARGE_BATCH)
        plain.copy(number, LARGE_BATCH, is_in=True)
    time.sleep(0.2)
    cpu_before_s = daemon.cpu_s()
    for _ in range(rounds):
        number += LARGE_BATCH
        _large_round(mover, plain, number, samples)
    samples.daemon_cpu_s = daemon.cpu_s() - cpu_before_s
    mover.close()
    return samples


def _large_round(mover: Mover, plain: PlainMemory, number: int, samples: Samples) -> None:
    started_s = time.perf_counter()
    plain.copy(number, LARGE_BATCH, is_in=True)
    samples.add("memcpy_in", started_s)
    started_s = time.perf_counter()
    saved = mover.put(number, LARGE_BATCH)
    samples.add("put", started_s)
    started_s = time.perf_counter()
    plain.copy(number + WORKING_SET_BYTES // LARGE_BYTES // 2, LARGE_BATCH, is_in=False)
    samples.add("memcpy_out", started_s)
    started_s = time.perf_counter()
    loaded = mover.get(number - REREAD_DISTANCE, LARGE_BATCH)
    if loaded == LARGE_BATCH:  # a batch that is not whole would look quick
        samples.add("get", started_s)
    samples.failed += 2 * LARGE_BATCH - saved - loaded
    samples.moved_bytes += (saved + loaded) * LARGE_BYTES


def measure_small(daemon: BenchDaemon, bare: Bare, rounds: int) -> Samples:
    """Single puts of 64 KiB, 64 in a row; a sample is the time of all 64, as is memcpy's."""
    mover = Mover(daemon.socket, SMALL_BYTES, WORKING_SET_BYTES // SMALL_BYTES, seed=2)
    plain = PlainMemory(bare, mover, SMALL_BYTES)
    samples = Samples()
    warm_rounds = WORKING_SET_BYTES // SMALL_BYTES // SMALL_PUTS
    number = 0
    for turn in range(warm_rounds + rounds):
        target = samples if turn >= warm_rounds else Samples()
        number += SMALL_PUTS
        started_s = time.perf_counter()
        plain.copy(number, SMALL_PUTS, is_in=True)
        target.add("memcpy_64k", started_s)
        started_s = time.perf_counter()
        saved = sum(mover.put(number + i, 1) for i in range(SMALL_PUTS))
        target.add("put_64k", started_s)
        target.failed += SMALL_PUTS - saved
        time.sleep(0.001)  # engines do not save without pause; the daemon prepares space meanwhile
    mover.close()
    return samples
