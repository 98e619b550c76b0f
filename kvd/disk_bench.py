"""Measures a folder the way the daemon uses it: the same store, threads, flags and sizes."""

from __future__ import annotations

import mmap
import os
import select
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infera_core import ffi, lib

from kvd.disk_store import DiskObject, DiskSettings, DiskState, DiskStatus, DiskStore, DiskStoreError

NAMESPACE = b"infera-kvd bench"
RETENTION: int = lib.STORE_RETAIN_SHORT
START_LIMIT_S = 30.0
STEP_LIMIT_S = 60.0
SLOTS_PER_DEPTH = 4
GATHER_S = 0.0002
"""No completion for so long: the device hangs."""


class BenchError(Exception):
    """The folder cannot be measured; the text says why and what helps."""


@dataclass
class Speed:
    """What one pass moved. Times of single transfers are from submission to completion."""

    operations: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    wrong: int = 0
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.size_bytes / self.seconds if self.seconds else 0.0

    def latency_ms(self, quantile: float) -> float:
        """A quantile of the times of single transfers."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] * 1000

    def summary(self) -> dict[str, float]:
        """Figures for a person or a program."""
        return {
            "gb_per_s": round(self.bytes_per_s / 1e9, 3),
            "operations_per_s": round(self.operations / self.seconds if self.seconds else 0.0, 1),
            "latency_ms_median": round(statistics.median(self.latencies_s) * 1000 if self.latencies_s else 0.0, 3),
            "latency_ms_99": round(self.latency_ms(0.99), 3),
            "wrong": self.wrong,
            "refused": self.refused,
        }


class BenchStore:
    """A store in a folder of its own below `path`, with buffers of one size; removed by `close`.

    There are four times as many requests as the device does at once (`depth`): what is over is followed by the next
    without waiting for this thread, which takes in what came in a moment together, since waking it costs as much as
    a small transfer.


    Raises:
        BenchError: when the folder cannot be used.
    """

    def __init__(self, path: Path, size_bytes: int, object_bytes: int, depth: int, settings: DiskSettings) -> None:
        self.folder = path / f"infera-kvd-bench-{os.getpid()}-{object_bytes}"
        self.object_bytes, self.slots, self.size_bytes = object_bytes, SLOTS_PER_DEPTH * depth, size_bytes
        self._stride = -(-object_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.folder.mkdir(parents=True)
            self.store = DiskStore([self.folder], settings)
        except (OSError, DiskStoreError) as error:
            raise BenchError(f"cannot measure {path}: {error}") from error
        self._memory = mmap.mmap(-1, self._stride * self.slots)
        self._view = ffi.from_buffer(self._memory, require_writable=True)
        self._base = int(ffi.cast("uintptr_t", self._view))
        for at in range(0, len(self._memory), 1 << 20):
            self._memory[at : at + (1 << 20)] = os.urandom(min(1 << 20, len(self._memory) - at))
        self._class_id = self.store.open_class(NAMESPACE, 0, 1, "bench")
        self._sums = [self._sum(slot) for slot in range(self.slots)]
        self._wait_until_loaded()

    def _address(self, slot: int) -> int:
        return self._base + slot * self._stride

    def _sum(self, slot: int) -> int:
        return int(lib.checksum_bytes(ffi.cast("void *", self._address(slot)), self.object_bytes))

    def _wait_until_loaded(self) -> None:
        end_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end_s:
            self.store.poll()
            device = self.store.devices()[0]
            if device.state == DiskState.ON and device.segments > 0:
                return
            if device.state in (DiskState.OFF, DiskState.READ_ONLY):
                break
            select.select([self.store.descriptor], [], [], 0.1)
        reason = self.store.devices()[0].reason
        self.close()
        raise BenchError(f"cannot measure {self.folder.parent}: {reason or 'it does not answer'}")

    @property
    def count(self) -> int:
        """Objects that fit the measured size."""
        return max(self.slots, self.size_bytes // self.object_bytes)

    def write(self, limit_s: float) -> Speed:
        """Write objects until the size is reached or the time is up; the same buffers again and again."""
        return self._run(limit_s, self._put)

    def read(self, limit_s: float, written: int) -> Speed:
        """Read them back in another order than they were written, verified."""
        step = next(n for n in (7919, 7907, 7901) if written % n)

        def get(number: int, slot: int) -> DiskStatus:
            key = _key(number * step % written)
            return self.store.get(self._class_id, key, 0, self._address(slot), self._stride, STEP_LIMIT_S, slot)

        return self._run(limit_s, get, count=written)

    def _put(self, number: int, slot: int) -> DiskStatus:
        item = DiskObject(self._class_id, _key(number), 0, self.object_bytes, self._sums[slot], RETENTION)
        return self.store.put(item, self._address(slot), slot)

    def _run(self, limit_s: float, begin: Callable[[int, int], DiskStatus], *, count: int | None = None) -> Speed:
        speed = Speed()
        total = self.count if count is None else count
        free = list(range(self.slots))
        begun_s = [0.0] * self.slots
        number = 0
        started_s = last_s = time.monotonic()
        while free != list(range(self.slots)) or number < total:
            now_s = time.monotonic()
            if now_s - started_s > limit_s:
                total = number
            while free and number < total:
                slot = free[-1]
                status = begin(number, slot)
                if status == DiskStatus.BUSY:
                    break
                number += 1
                if status != DiskStatus.OK:
                    speed.refused += 1
                    continue
                free.pop()
                begun_s[slot] = time.monotonic()
            select.select([self.store.descriptor], [], [], 0.02)
            if len(free) < self.slots // 2:
                time.sleep(GATHER_S)
            self.store.poll()
            for done in self.store.completions():
                last_s = time.monotonic()
                free.append(done.token)
                speed.wrong += done.status != DiskStatus.OK
                speed.operations += 1
                speed.size_bytes += self.object_bytes
                speed.latencies_s.append(last_s - begun_s[done.token])
            if now_s - last_s > STEP_LIMIT_S:
                raise BenchError(f"{self.folder.parent} has not answered for {STEP_LIMIT_S:.0f} s")
            if len(free) == self.slots:
                free.sort()
        speed.seconds = last_s - started_s
        return speed

    def close(self) -> None:
        """Take everything away again."""
        if self.store.close():
            ffi.release(self._view)
            self._memory.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")
