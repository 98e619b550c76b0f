"""Which blocks are being saved, so that none is saved while a step writes to it.

Blocks are not held for a save: an engine whose prefix cache is reset or whose memory is short gets them at once. So
the scheduler's half remembers what it ordered until every rank has reported, and when a step is going to write to one
of these blocks, the workers are told in the same step's orders to give that save up first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Save:
    block_ids: list[int]
    ranks_missing: int


class PendingSaves:
    """Saves ordered and not yet reported by every rank. Block ids are unique over all groups: they share one pool."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._saves: dict[int, _Save] = {}
        self._saving: dict[int, int] = {}
        """Block id -> the newest save of it."""
        self._made = 0

    def __len__(self) -> int:
        return len(self._saves)

    def begin(self, block_ids: list[int]) -> int:
        """A number for a new save of these blocks."""
        self._made += 1
        self._saves[self._made] = _Save(block_ids, self._rank_count)
        for block_id in block_ids:
            self._saving[block_id] = self._made
        return self._made

    def reported(self, save_id: int, ranks: int) -> None:
        """Some ranks are done with a save, or gave it up."""
        save = self._saves.get(save_id)
        if save is None:
            return
        save.ranks_missing -= ranks
        if save.ranks_missing > 0:
            return
        del self._saves[save_id]
        for block_id in save.block_ids:
            if self._saving.get(block_id) == save_id:
                del self._saving[block_id]

    def among(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that are being saved."""
        if not self._saving:
            return []
        return [block_id for block_id in block_ids if block_id in self._saving]
