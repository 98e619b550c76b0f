"""A disk store used one call at a time, with bytes that follow from the key."""

from __future__ import annotations

import hashlib
import mmap
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from infera_core import ffi, lib

from kvd.disk_store import DiskObject, DiskSettings, DiskState, DiskStatus, DiskStore

SEGMENT_BYTES = 1 << 20
SIZE_BYTES = 8 * SEGMENT_BYTES
CAPACITY_BYTES = 512 << 10
NAMESPACE = b"disk user's name"
WAIT_S = 20.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


def contents(number: int, shard: int, length_bytes: int) -> bytes:
    seed = hashlib.sha256(f"{number} {shard}".encode()).digest()
    return (seed * (length_bytes // 32 + 1))[:length_bytes]


class DiskUser:
    """A store with one class of `shards` shards. Leaving the context closes it."""

    def __init__(self, *paths: Path, shards: int = 1, **settings: object) -> None:
        chosen: dict[str, object] = {"size_bytes": SIZE_BYTES * len(paths), "segment_bytes": SEGMENT_BYTES, "depth": 4}
        self.store = DiskStore(paths, DiskSettings(**(chosen | settings)))  # type: ignore[arg-type]
        self._memory = mmap.mmap(-1, CAPACITY_BYTES)
        self._view = ffi.from_buffer(self._memory, require_writable=True)
        self.address = int(ffi.cast("uintptr_t", self._view))
        self.shards = shards
        self.wait(lambda: self.store.is_loaded)
        self.class_id = self.store.open_class(NAMESPACE, 0, shards, "model")

    def wait(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while True:
            self.store.poll()
            if condition():
                return
            assert time.monotonic() < end_s, self.store.devices()
            select.select([self.store.descriptor], [], [], 0.01)

    def wait_until_on(self) -> None:
        def has_room() -> bool:
            return all(device.state == DiskState.ON and device.segments for device in self.store.devices())

        self.wait(has_room)

    def _over(self) -> DiskStatus:
        found = []

        def is_over() -> bool:
            found.extend(self.store.completions())
            return bool(found)

        self.wait(is_over)
        (done,) = found
        self.last = done
        return done.status

    def put(
        self, number: int, length_bytes: int, *, shard: int = 0, retention: int = 2, expires_s: int = 0
    ) -> DiskStatus:
        """Put one, waiting while the store is busy."""
        self._memory[:length_bytes] = contents(number, shard, length_bytes)
        total = int(lib.checksum_bytes(self._view, length_bytes))
        item = DiskObject(self.class_id, key_of(number), shard, length_bytes, total, retention, expires_s, number, 7)
        status = DiskStatus.BUSY
        end_s = time.monotonic() + WAIT_S
        while status == DiskStatus.BUSY and time.monotonic() < end_s:
            status = self.store.put(item, self.address, number)
            if status == DiskStatus.BUSY:
                select.select([self.store.descriptor], [], [], 0.01)
                self.store.poll()
        return self._over() if status == DiskStatus.OK else status

    def get(self, number: int, *, shard: int = 0, deadline_s: float = 10.0) -> tuple[DiskStatus, bytes]:
        status = self.store.get(
            self.class_id, key_of(number), shard, self.address, CAPACITY_BYTES, deadline_s, number
        )  # fmt: skip
        if status == DiskStatus.OK:
            status = self._over()
        if status != DiskStatus.OK:
            return status, b""
        return status, self._memory[: self.last.object.length_bytes]

    def serves(self, number: int, length_bytes: int, shard: int = 0) -> bool:
        """Whether it is served; then it must be right."""
        status, data = self.get(number, shard=shard)
        if status != DiskStatus.OK:
            return False
        assert data == contents(number, shard, length_bytes), "a wrong byte"
        return True

    def close(self) -> None:
        assert self.store.close()

    def __enter__(self) -> DiskUser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
