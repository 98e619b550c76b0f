"""A worker's half: moves blocks between this rank's cache tensors and the arena."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infera_vllm.metadata import InferaWorkerMetadata, LoadOrder, SaveOrder
from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier

log = logging.getLogger("infera.vllm")


class WorkerSide:
    """One rank's half. Called from the worker's thread only."""

    def __init__(self, client: KvdClient, spec: RecordSpec, shard: int, copier: CpuCopier) -> None:
        self._client = client
        self._spec = spec
        self._shard = shard
        self._copier = copier
        self._failed: set[int] = set()
        self._done: dict[int, int] = {}
        self._damaged: dict[int, set[int]] = {}
        self._failed_in_step = 0

    def load(self, orders: Sequence[LoadOrder]) -> None:
        """Fill blocks from the arena before the step computes. What fails is reported, not raised."""
        for order in orders:
            failed = set(order.lost_block_ids) | self._load_one(order)
            if failed:
                log.warning(
                    "request %s: %d of %d cached blocks could not be used and are computed again",
                    order.request_id, len(failed), len(order.block_ids) + len(order.lost_block_ids),
                )  # fmt: skip
            self._failed |= failed
            self._failed_in_step += len(failed)
            self._done[order.load_id] = 1

    def _load_one(self, order: LoadOrder) -> set[int]:
        """Blocks of this order that do not hold the right bytes now."""
        if not order.block_ids:
            return set()
        session = self._client.session()
        if session is None or session.arena.instance != order.instance:
            return set(order.block_ids)
        arena = session.arena
        places = [arena.locate(slot, self._shard) for slot in order.slots]
        sound = [place for place in places if place and place.size_bytes >= self._copier.object_bytes]
        if len(sound) != len(places):
            return set(order.block_ids)
        addresses = [arena.data_address + place.offset_bytes for place in sound]
        delivered = self._copier.load(order.block_ids, addresses)
        damaged = {position for position, place in enumerate(sound) if delivered[position] != place.checksum}
        if damaged:
            self._damaged[order.load_id] = damaged
        return {order.block_ids[position] for position in damaged}

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Copy completed blocks into the arena.

        After a failed load in the same step nothing is saved: what was computed on top of the bad
        blocks is wrong, and other requests may share them.
        """
        if self._failed_in_step:
            return
        for order in orders:
            self._client.put(self._spec, self._shard, order.keys, order.depths_grains, self._copier, order.block_ids)

    def take_failed(self) -> set[int]:
        """Blocks to compute again, once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> InferaWorkerMetadata | None:
        """What the scheduler's half must know of this step, once."""
        report = InferaWorkerMetadata(self._done, self._failed_in_step, self._damaged)
        self._done, self._failed_in_step, self._damaged = {}, 0, {}
        return report if report.loads_done else None
