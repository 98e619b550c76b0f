"""The line of requests that wait because every place that could serve them has enough to do.

One *lane* for each group of workers (a model and role), so that a full model does not hold up another. Within a lane
the smallest priority goes first, among equals the one that came first. The limit holds over all lanes: at the limit
a request with a better priority takes the place of the worst one waiting, else it is refused.

Sans-IO: the caller keeps the waiting requests and wakes the ones this names. Guarantee: every entry leaves exactly
once (served, given up, or displaced), and there are never more than the limit's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

WAITING_MAX_DEFAULT: Final = 1_024


@dataclass(slots=True)
class Waiter:
    """One waiting request."""

    lane: str
    priority: int
    number: int
    since_s: float
    is_waiting: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return self.priority, self.number


@dataclass(slots=True)
class _Lane:
    # Entries that left stay in the heap until they come up; `waiting` counts the others.
    heap: list[tuple[tuple[int, int], Waiter]] = field(default_factory=list)
    waiting: dict[int, Waiter] = field(default_factory=dict)


class WaitingFullError(Exception):
    """As many requests wait as may, and none of them is less urgent."""


class WaitingLine:
    """All lanes. ``count`` requests wait at the moment."""

    def __init__(self, waiting_max: int = WAITING_MAX_DEFAULT) -> None:
        self._waiting_max = waiting_max
        self._lanes: dict[str, _Lane] = {}
        self._made = 0
        self.count = 0

    def has_before(self, lane: str, priority: int) -> bool:
        """Whether somebody in the lane waits whom a new request of this priority must not overtake."""
        head = self.head(lane)
        return head is not None and head.priority <= priority

    def join(self, lane: str, priority: int, now_s: float) -> tuple[Waiter, Waiter | None]:
        """Begin to wait; also whoever was displaced for it. Raises WaitingFullError."""
        displaced = self._make_room(priority)
        self._made += 1
        waiter = Waiter(lane, priority, self._made, now_s)
        found = self._lanes.setdefault(lane, _Lane())
        heapq.heappush(found.heap, (waiter.rank, waiter))
        found.waiting[waiter.number] = waiter
        self.count += 1
        return waiter, displaced

    def leave(self, waiter: Waiter) -> bool:
        """Served, or gave up; False when it had left before."""
        if not waiter.is_waiting:
            return False
        waiter.is_waiting = False
        lane = self._lanes[waiter.lane]
        del lane.waiting[waiter.number]
        self.count -= 1
        if not lane.waiting:
            del self._lanes[waiter.lane]
        elif len(lane.heap) > 2 * len(lane.waiting) + 16:
            lane.heap = [(entry.rank, entry) for entry in lane.waiting.values()]
            heapq.heapify(lane.heap)
        return True

    def head(self, lane: str) -> Waiter | None:
        """Who is next in a lane."""
        found = self._lanes.get(lane)
        if found is None:
            return None
        while not found.heap[0][1].is_waiting:
            heapq.heappop(found.heap)
        return found.heap[0][1]

    def heads(self) -> list[Waiter]:
        """Who is next in every lane."""
        return [head for lane in list(self._lanes) if (head := self.head(lane)) is not None]

    def _make_room(self, priority: int) -> Waiter | None:
        if self.count < self._waiting_max:
            return None
        everybody = (waiter for lane in self._lanes.values() for waiter in lane.waiting.values())
        worst = max(everybody, key=lambda waiter: waiter.rank, default=None)
        if worst is None or worst.priority <= priority:
            raise WaitingFullError(f"{self._waiting_max} requests are waiting")
        self.leave(worst)
        return worst
