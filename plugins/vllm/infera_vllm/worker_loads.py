"""A worker's loads: one thread copies pinned records into the blocks of parked requests.

The blocks belong to the request until its load is reported over, so a load is reported only when the thread has left
its blocks: also one that failed, or that came too late. Between two small batches the thread looks at the deadline.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from infera_vllm.faults import Fault, LoadFaults
from infera_vllm.metadata import GroupLoad, LoadOrder, LoadReport
from kvd.client.arena import Arena, Location
from kvd.client.client import KvdClient
from kvd.client.copier import BlockCopier

DEADLINE_S: Final = 5.0
"""From the order to the last byte. What takes longer is computed instead."""
QUEUE_MAX: Final = 4096
BATCH_BYTES: Final = 8 << 20
STOP_S_MAX: Final = 5.0

log = logging.getLogger("infera.vllm")


class LoadFailedError(Exception):
    """Blocks must be computed; the text is one of few words. The first `good_blocks` of the first group are right."""

    def __init__(self, reason: str, good_blocks: int = 0, damaged: set[tuple[int, int]] | None = None) -> None:
        super().__init__(reason)
        self.good_blocks = good_blocks
        self.damaged = damaged or set()


@dataclass(frozen=True)
class EndedOrder:
    """An order this rank is done with."""

    order: LoadOrder
    report: LoadReport
    good_blocks: int = 0
    """Of a failed load of one group: how many leading blocks hold what they should all the same."""


class WorkerLoads:
    """The thread and its queue. All methods but the thread's own belong to the worker's thread."""

    def __init__(
        self, client: KvdClient, copiers: Mapping[int, BlockCopier], shard: int, faults: LoadFaults,
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        """`copiers`: one for each group, by its position."""
        self._client = client
        self._copiers = copiers
        self._shard = shard
        self._faults = faults
        self._deadline_s = deadline_s
        self._queue: queue.Queue[tuple[LoadOrder, float, object] | None] = queue.Queue(QUEUE_MAX)
        self._marker = next(iter(copiers.values()))
        self._ended: queue.SimpleQueue[EndedOrder] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="infera-loads", daemon=True)
        self._thread.start()

    def submit(self, order: LoadOrder) -> None:
        """Begin a load. It is reported, whatever happens to it."""
        try:
            self._queue.put_nowait((order, time.monotonic(), self._marker.mark()))
        except queue.Full:
            self._ended.put(EndedOrder(order, LoadReport(1, 0.0, 0, "queue_full")))

    def take_ended(self) -> list[EndedOrder]:
        """Orders that are over since the last call."""
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def close(self) -> None:
        """Stop after the batch being copied; loads that wait are not reported any more."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # the thread looks at the flag before each load
            self._queue.put_nowait(None)
        self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None and not self._stopping:
            order, began_s, mark = entry
            self._ended.put(self._load(order, began_s, mark))

    def _load(self, order: LoadOrder, began_s: float, mark: object) -> EndedOrder:
        try:
            size_bytes = self._copy_all(order, began_s + self._deadline_s, mark)
        except LoadFailedError as error:
            report = LoadReport(1, time.monotonic() - began_s, 0, str(error), error.damaged)
            return EndedOrder(order, report, error.good_blocks)
        except Exception:
            log.exception("request %s: unexpected error while loading cached blocks", order.request_id)
            return EndedOrder(order, LoadReport(1, time.monotonic() - began_s, 0, "error"))
        return EndedOrder(order, LoadReport(1, time.monotonic() - began_s, size_bytes))

    def _copy_all(self, order: LoadOrder, deadline_s: float, mark: object) -> int:
        fault = self._faults.next()
        if fault.fails:
            raise LoadFailedError("injected")
        if not order.instance:
            raise LoadFailedError("vanished")
        session = self._client.session()
        if session is None or session.arena.instance != order.instance:
            raise LoadFailedError("kvd_away")
        time.sleep(fault.delay_s)
        size_bytes = sum(self._copy_group(group, session.arena, deadline_s, mark, fault) for group in order.groups)
        if order.lost_block_ids:
            raise LoadFailedError("vanished", len(order.block_ids) - len(order.lost_block_ids))
        return size_bytes

    def _copy_group(self, group: GroupLoad, arena: Arena, deadline_s: float, mark: object, fault: Fault) -> int:
        copier = self._copiers[group.position]
        copier.prepare(arena)
        places = [self._locate(arena, slot, copier) for slot in group.slots]
        step = max(1, BATCH_BYTES // copier.object_bytes)
        for start in range(0, len(places), step):
            if self._stopping or time.monotonic() >= deadline_s:
                raise LoadFailedError("deadline", start)
            batch = places[start : start + step]
            addresses = [arena.data_address + place.offset_bytes for place in batch]
            delivered = copier.load(group.block_ids[start : start + step], addresses, mark)
            damaged = {
                (group.position, start + at) for at, place in enumerate(batch) if delivered[at] != place.checksum
            }
            if fault.corrupts and start == 0:
                damaged.add((group.position, 0))
            if damaged:
                raise LoadFailedError("damaged", min(at for _, at in damaged), damaged)
        return copier.object_bytes * len(places)

    def _locate(self, arena: Arena, slot: int, copier: BlockCopier) -> Location:
        place = arena.locate(slot, self._shard)
        if place is None or place.size_bytes < copier.object_bytes:
            raise LoadFailedError("vanished")
        return place
