from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from infera.router.waiting import Waiter, WaitingFullError, WaitingLine

LIMIT = 6
LANES = ["m", "n"]


class Line(RuleBasedStateMachine):
    """Against a list that is sorted anew each time."""

    waiters = Bundle("waiters")

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(LIMIT)
        self.model: list[Waiter] = []
        self.now = 0.0

    @rule(target=waiters, lane=st.sampled_from(LANES), priority=st.integers(-2, 2))
    def join(self, lane: str, priority: int) -> Waiter | None:
        self.now += 1
        worst = max(self.model, key=lambda waiter: waiter.rank, default=None)
        is_full = len(self.model) == LIMIT
        if is_full and worst is not None and worst.priority <= priority:
            with pytest.raises(WaitingFullError):
                self.line.join(lane, priority, self.now)
            return None
        waiter, displaced = self.line.join(lane, priority, self.now)
        assert displaced is (worst if is_full else None)
        if displaced is not None:
            assert not displaced.is_waiting
            self.model.remove(displaced)
        self.model.append(waiter)
        return waiter

    @rule(waiter=waiters)
    def leave(self, waiter: Waiter | None) -> None:
        if waiter is not None:
            assert self.line.leave(waiter) == (waiter in self.model)
            if waiter in self.model:
                self.model.remove(waiter)

    @rule(lane=st.sampled_from(LANES))
    def serve(self, lane: str) -> None:
        head = self.line.head(lane)
        if head is not None:
            self.line.leave(head)
            self.model.remove(head)

    @invariant()
    def agrees(self) -> None:
        assert self.line.count == len(self.model) <= LIMIT
        for lane in LANES:
            own = sorted((waiter for waiter in self.model if waiter.lane == lane), key=lambda waiter: waiter.rank)
            assert self.line.head(lane) is (own[0] if own else None)
            for priority in range(-3, 4):
                assert self.line.has_before(lane, priority) == any(waiter.priority <= priority for waiter in own)
        assert sum(len(lane.heap) for lane in self.line._lanes.values()) <= 2 * len(self.model) + 17 * len(LANES)


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_a_full_lane_does_not_hold_up_another() -> None:
    """production-stack#634: other requests blocked behind one. Lanes are looked at separately."""
    line = WaitingLine()
    line.join("m", 0, 0.0)
    assert not line.has_before("n", 0)
    assert [head.lane for head in line.heads()] == ["m"]


def test_many_that_gave_up_leave_no_memory_behind() -> None:
    line = WaitingLine(8)
    last, _ = line.join("m", 5, 0.0)
    for _ in range(10_000):
        waiter, _ = line.join("m", 1, 0.0)
        line.leave(waiter)
    assert len(line._lanes["m"].heap) < 40
    line.leave(last)
    assert not line._lanes
