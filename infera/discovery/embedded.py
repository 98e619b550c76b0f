"""Embedded discovery: agents register and heartbeat over HTTP with every server; leases live in the server.

Nothing is stored: after a restart the next heartbeats bring the fleet back, because a heartbeat is a full record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from infera.discovery.record import WorkerRecord, without_load
from infera.discovery.registry import FleetListener

LEASE_TTL_S: Final = 6.0
WORKERS_MAX_DEFAULT: Final = 1024
ENDED_MAX: Final = 4096
EXPIRY_CHECKS_PER_LEASE: Final = 12
_log = logging.getLogger(__name__)


class RegistryFullError(Exception):
    """The fleet has as many workers as this server accepts."""


class TokenizerConflictError(Exception):
    """The model's name is already served with other tokens."""


class EndedIncarnationError(Exception):
    """This incarnation was deregistered or replaced; a late heartbeat must not bring it back."""


@dataclass(slots=True)
class _Lease:
    record: WorkerRecord
    expires_s: float


class EmbeddedRegistry:
    """Leases kept in memory. Every method runs on one event loop."""

    name = "embedded"

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_ttl_s: float = LEASE_TTL_S,
        workers_max: int = WORKERS_MAX_DEFAULT,
    ) -> None:
        self.instance = secrets.token_hex(16)
        self.lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._workers_max = workers_max
        self._leases: dict[str, _Lease] = {}
        self._ended: dict[str, float] = {}
        self._listener: FleetListener | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: FleetListener) -> None:
        """Begin to report to ``listener`` and to expire leases."""
        self._listener = listener
        self._task = asyncio.create_task(self._expire_forever(), name="embedded-registry")

    async def stop(self) -> None:
        """Stop expiring leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def workers(self) -> Mapping[str, WorkerRecord]:
        """Records by incarnation."""
        return {incarnation: lease.record for incarnation, lease in self._leases.items()}

    def problems(self) -> list[str]:
        """Says so when no further worker can join."""
        if len(self._leases) >= self._workers_max:
            return [f"the registry is full with {self._workers_max} workers: raise --workers-max"]
        return []

    def put(self, record: WorkerRecord) -> bool:
        """Register or renew; True when the lease was known.

        Raises TokenizerConflictError, RegistryFullError, EndedIncarnationError.
        """
        now_s = self._clock()
        if self._ended.get(record.incarnation, 0.0) > now_s:
            raise EndedIncarnationError(
                f"incarnation {record.incarnation} of {record.worker_id} has ended; a restarted engine needs a new one"
            )
        self._check_tokenizer(record)
        lease = self._leases.get(record.incarnation)
        if lease is None:
            self._replace_older_lives(record)
            if len(self._leases) >= self._workers_max:
                raise RegistryFullError(f"{self._workers_max} workers are registered already: raise --workers-max")
            self._leases[record.incarnation] = _Lease(record, now_s + self.lease_ttl_s)
            self._tell_joined(record)
            return False
        old, lease.record, lease.expires_s = lease.record, record, now_s + self.lease_ttl_s
        if self._listener is not None:
            if without_load(old) != without_load(record):
                self._listener.worker_changed(old, record)
            self._listener.worker_beat(record)
        return True

    def delete(self, incarnation: str) -> bool:
        """Deregister; True when it was there. Late heartbeats of it are refused for one lease."""
        self._end(incarnation, self._clock() + self.lease_ttl_s)
        return self._drop(incarnation, "deregistered")

    def expire(self) -> int:
        """Drop workers whose lease ran out; how many."""
        now_s = self._clock()
        late = [incarnation for incarnation, lease in self._leases.items() if lease.expires_s <= now_s]
        for incarnation in late:
            self._drop(incarnation, "lease expired")
        self._ended = {incarnation: until for incarnation, until in self._ended.items() if until > now_s}
        return len(late)

    def _check_tokenizer(self, record: WorkerRecord) -> None:
        for lease in self._leases.values():
            other = lease.record
            if other.worker_id == record.worker_id or other.model != record.model:
                continue
            if other.tokenizer_digest and record.tokenizer_digest and other.tokenizer_digest != record.tokenizer_digest:
                raise TokenizerConflictError(
                    f"model {record.model!r} is served by {other.worker_id} with another tokenizer or chat template; "
                    "give one of them another --served-model-name, or the same files"
                )

    def _replace_older_lives(self, record: WorkerRecord) -> None:
        for incarnation, lease in list(self._leases.items()):
            if lease.record.worker_id == record.worker_id:
                # For good: two lives of one place must not take turns.
                self._end(incarnation, float("inf"))
                self._drop(incarnation, f"replaced by incarnation {record.incarnation}")

    def _end(self, incarnation: str, until_s: float) -> None:
        while len(self._ended) >= ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[incarnation] = until_s

    def _drop(self, incarnation: str, reason: str) -> bool:
        lease = self._leases.pop(incarnation, None)
        if lease is None:
            return False
        _log.info("fleet: worker %s left (%s), incarnation %s", lease.record.worker_id, reason, incarnation)
        if self._listener is not None:
            self._listener.worker_left(lease.record, reason)
        return True

    def _tell_joined(self, record: WorkerRecord) -> None:
        _log.info("fleet: worker %s joined at %s, model %s", record.worker_id, record.url, record.model)
        if self._listener is not None:
            self._listener.worker_joined(record)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self.lease_ttl_s / EXPIRY_CHECKS_PER_LEASE)
            self.expire()
