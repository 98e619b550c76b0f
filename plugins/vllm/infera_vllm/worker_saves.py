"""A worker's saves: one thread copies completed blocks into the arena while the next steps run.

A block is not held for its save. Before a step writes to blocks whose save was ordered, `give_up` takes them out of
what waits, and waits for the one batch being copied right now if it has any of them: milliseconds, never for the
daemon, since nothing is asked of it while a batch counts as being copied.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from infera_core.keys import KEY_BYTES

from infera_vllm.metadata import SaveOrder
from infera_vllm.stats import InferaStats
from kvd.client.client import Grant, KvdClient, RecordSpec
from kvd.client.copier import BlockCopier, CpuCopier

WAITING_BLOCKS_MAX: Final = 16_384
BATCH_BYTES: Final = 8 << 20
STOP_S_MAX: Final = 5.0

log = logging.getLogger("infera.vllm")


@dataclass
class _Save:
    """An order, with the spec it was given under, and which of its blocks are not to be saved any more."""

    order: SaveOrder
    spec: RecordSpec
    mark: object
    """The step that completed the blocks."""
    given_up: set[int] = field(default_factory=set)


class WorkerSaves:
    """The thread, what waits for it, and what it is copying. Methods belong to the worker's thread."""

    def __init__(
        self, client: KvdClient, copiers: Mapping[int, BlockCopier], shard: int,
        waiting_blocks_max: int = WAITING_BLOCKS_MAX,
    ) -> None:  # fmt: skip
        self._client = client
        self._copiers = copiers
        self._shard = shard
        self._waiting_blocks_max = waiting_blocks_max
        self._changed = threading.Condition()
        self._waiting: deque[_Save] = deque()
        self._waiting_blocks = 0
        self._current: _Save | None = None
        self._copying: frozenset[int] = frozenset()
        self._ended: list[int] = []
        self._stats = InferaStats()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="infera-saves", daemon=True)
        self._thread.start()

    def submit(self, order: SaveOrder, spec: RecordSpec) -> None:
        """Save these blocks soon; past the limit of what may wait they are not saved."""
        with self._changed:
            if self._waiting_blocks + len(order.block_ids) > self._waiting_blocks_max:
                self._stats.add("saves_dropped_blocks", len(order.block_ids), "queue_full")
                self._ended.append(order.save_id)
                return
            self._waiting.append(_Save(order, spec, self._copiers[order.position].mark()))
            self._waiting_blocks += len(order.block_ids)
            self._changed.notify_all()

    def give_up(self, block_ids: Collection[int]) -> None:
        """These blocks are about to be written to: when this returns, nothing reads them any more."""
        if not block_ids:
            return
        wanted = set(block_ids)
        with self._changed:
            for save in (*self._waiting, *([self._current] if self._current else [])):
                save.given_up |= wanted.intersection(save.order.block_ids)
            while self._copying & wanted:
                self._changed.wait()

    def take_ended(self) -> list[int]:
        """Numbers of the orders that are over, each once."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def take_stats(self) -> InferaStats | None:
        """What was counted since the last call."""
        with self._changed:
            return self._stats.take()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether everything ordered so far was saved or given up in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, timeout_s)

    def close(self) -> None:
        """Stop after the batch being copied. What waits is not saved."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while (save := self._next()) is not None:
            try:
                self._save(save)
            except Exception:
                log.exception("unexpected error while saving blocks; they are not saved")
            with self._changed:
                self._current = None
                self._ended.append(save.order.save_id)
                self._changed.notify_all()

    def _next(self) -> _Save | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            self._current = self._waiting.popleft()
            self._waiting_blocks -= len(self._current.order.block_ids)
            return self._current

    def _save(self, save: _Save) -> None:
        count = len(save.order.block_ids)
        step = max(1, BATCH_BYTES // self._copiers[save.order.position].object_bytes)
        for start in range(0, count, step):
            if self._stopping:
                return
            self._save_batch(save, range(start, min(start + step, count)))

    def _save_batch(self, save: _Save, batch: range) -> None:
        """First into space reserved ahead; for the rest the daemon is asked, and meanwhile nothing is copied."""
        order, copier = save.order, self._copiers[save.order.position]
        if not isinstance(copier, CpuCopier):  # what is reserved ahead is filled by one C call, from host memory
            self._save_by_asking(save, list(batch), copier)
            return
        wanted = self._begin_copy(save, list(batch))
        try:
            saved = self._client.put_ready(
                save.spec, self._shard, _keys(order, wanted), [order.depths_grains[at] for at in wanted], copier,
                [order.block_ids[at] for at in wanted], retention=order.retention, ttl_s=order.ttl_s,
            )  # fmt: skip
        finally:
            self._end_copy()
        self._count(saved, copier)
        if rest := wanted[saved:]:
            self._save_by_asking(save, rest, copier)

    def _save_by_asking(self, save: _Save, rest: list[int], copier: BlockCopier) -> None:
        order = save.order
        keys = [order.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in rest]
        depths = [order.depths_grains[at] for at in rest]
        grants = self._client.reserve(
            save.spec, self._shard, keys, depths, retention=order.retention, ttl_s=order.ttl_s
        )
        if grants:
            copier.prepare(grants[0].arena)
        granted = {rest[grant.position]: grant for grant in grants}
        wanted = self._begin_copy(save, list(granted))
        kept = [granted[at] for at in wanted]
        try:
            sums = copier.save([order.block_ids[at] for at in wanted], [grant.address for grant in kept], save.mark)
        finally:
            self._end_copy()
        left: list[Grant] = [grant for at, grant in granted.items() if at not in set(wanted)]
        if left:
            self._client.give_up(left)
        saved = self._client.commit(kept, sums) if kept else 0
        self._count(saved, copier)
        self._drop(len(rest) - len(granted), "refused_or_held")

    def _begin_copy(self, save: _Save, places: list[int]) -> list[int]:
        """Those of the places that are still wanted; they count as being copied from here on."""
        with self._changed:
            block_ids = save.order.block_ids
            wanted = [at for at in places if block_ids[at] not in save.given_up]
            if len(wanted) < len(places):
                self._stats.add("saves_dropped_blocks", len(places) - len(wanted), "block_reused")
            self._copying = frozenset(block_ids[at] for at in wanted)
        return wanted

    def _end_copy(self) -> None:
        with self._changed:
            self._copying = frozenset()
            self._changed.notify_all()

    def _count(self, saved: int, copier: BlockCopier) -> None:
        if saved:
            with self._changed:
                self._stats.add("saved_blocks", saved)
                self._stats.add("saved_bytes", saved * copier.object_bytes)

    def _drop(self, count: int, reason: str) -> None:
        if count:
            with self._changed:
                self._stats.add("saves_dropped_blocks", count, reason)


def _keys(order: SaveOrder, places: list[int]) -> bytes:
    if len(places) == len(order.block_ids):
        return order.keys
    return b"".join(order.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in places)
