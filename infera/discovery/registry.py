"""What every registry of workers offers, whichever way the records come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from infera.discovery.record import WorkerRecord


class FleetListener(Protocol):
    """Told of every change, in order, on the event loop. Must not block."""

    def worker_joined(self, record: WorkerRecord) -> None:
        """A worker is there for the first time, or again after its lease was lost."""

    def worker_changed(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """The same incarnation sent a different record."""

    def worker_beat(self, record: WorkerRecord) -> None:
        """The worker said that it is alive."""

    def worker_left(self, record: WorkerRecord, reason: str) -> None:
        """The worker is gone: its cached blocks, its load and its events with it."""


class Registry(Protocol):
    """A source of worker records. Backends: embedded; later etcd and kubernetes."""

    name: str

    async def start(self, listener: FleetListener) -> None:
        """Begin to report. Raises OSError when the backend cannot be reached at all."""

    async def stop(self) -> None:
        """Stop reporting and release everything."""

    def workers(self) -> Mapping[str, WorkerRecord]:
        """The fleet as last known, by incarnation."""

    def problems(self) -> list[str]:
        """What is degraded, in words that name the cure; empty when all is well."""
