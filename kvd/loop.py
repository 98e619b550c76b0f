"""Typed entrance to the daemon's hot thread (see `csrc/loop.h`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infera_core import ffi, lib


@dataclass(frozen=True)
class Notice:
    """Something the thread leaves to Python: a request it does not answer itself, or an end.

    `payload` is None when the connection is gone; `is_malformed` says that its bytes were no frames.
    """

    connection: int
    message: int = 0
    request_id: int = 0
    payload: bytes | None = None
    is_malformed: bool = False


class Loop:
    """The running thread. As a context manager it is the lock around the store.

    `store_handle` is the C store; it must outlive the loop. Durations in seconds.

    Raises:
        MemoryError: when the system has no descriptors or thread for it.
    """

    def __init__(self, store_handle: Any, *, reservation_s: float, incomplete_s: float) -> None:
        self._handle = lib.loop_start(store_handle, int(reservation_s * 1e9), int(incomplete_s * 1e9))
        if self._handle == ffi.NULL:
            raise MemoryError("cannot start the serving thread; raise the limits on open files and threads")
        self._notice = ffi.new("loop_notice *")
        self._payload = ffi.new("uint8_t[]", lib.LOOP_CONTROL_BYTES_MAX)

    def __enter__(self) -> None:
        lib.loop_lock(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.loop_unlock(self._handle)

    @property
    def doorbell(self) -> int:
        """The eventfd clients ring."""
        return int(lib.loop_doorbell(self._handle))

    @property
    def notice_descriptor(self) -> int:
        """Readable when `notices` has something."""
        return int(lib.loop_notice_descriptor(self._handle))

    @property
    def events_descriptor(self) -> int:
        """Readable when the store has events, until `events_taken`."""
        return int(lib.loop_events_descriptor(self._handle))

    def events_taken(self) -> None:
        """Say that the store's events are being taken now."""
        lib.loop_events_taken(self._handle)

    def add(self, descriptor: int, client: int, received: bytes) -> int:
        """Hand over a connected socket with what was already read from it; returns its name, 0 at the limit."""
        return int(lib.loop_add(self._handle, descriptor, client, received, len(received)))

    def send(self, connection: int, frame: bytes) -> None:
        """Send to a connection, if it is still there."""
        lib.loop_send(self._handle, connection, frame, len(frame))

    def close_connection(self, connection: int) -> None:
        """Close a connection, if it is still there."""
        lib.loop_close(self._handle, connection)

    def notices(self) -> Iterator[Notice]:
        """Yield what has piled up."""
        while True:
            lib.loop_next(self._handle, self._notice, self._payload)
            kind = self._notice.kind
            if kind == lib.LOOP_NOTHING:
                return
            connection = int(self._notice.connection)
            if kind == lib.LOOP_REQUEST:
                payload = bytes(ffi.buffer(self._payload, self._notice.payload_bytes))
                yield Notice(connection, int(self._notice.message), int(self._notice.request_id), payload)
            else:
                yield Notice(connection, is_malformed=kind == lib.LOOP_MALFORMED)

    def want_stock(self, client: int, class_id: int, shard: int, count: int) -> bool:
        """Keep extents ready for a client. Call with the lock held."""
        return bool(lib.loop_want_stock(self._handle, client, class_id, shard, count))

    def drain_client(self, client: int) -> None:
        """Take in what a client left in its ring, before it is detached. Call with the lock held."""
        lib.loop_drain_client(self._handle, client)

    def stats(self) -> dict[str, int]:
        """Counters of `loop_stats` by name."""
        stats = ffi.new("loop_stats *")
        lib.loop_read_stats(self._handle, stats)
        return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("loop_stats").fields}

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._handle != ffi.NULL:
            lib.loop_stop(self._handle)
            self._handle = ffi.NULL
