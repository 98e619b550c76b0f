"""The waiting room with the real line and real tasks; what is saturated is decided by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from infera.router.core import SaturatedError
from infera.router.waiting import WaitingLine
from infera.server.errors import ApiError
from infera.server.metrics import ServerMetrics
from infera.server.waiting_room import WaitingRoom


class Bench:
    """Seats that requests take and give back."""

    def __init__(self, seats: int = 0, waiting_max: int = 10, timeout_s: float = 30.0) -> None:
        self.seats = seats
        self.order: list[str] = []
        self.metrics = ServerMetrics()
        self.line = WaitingLine(waiting_max)
        self.room = WaitingRoom(self.line, timeout_s, self.metrics)

    def take(self, name: str) -> Callable[[], str]:
        def attempt() -> str:
            if not self.seats:
                raise SaturatedError(3.2)
            self.seats -= 1
            self.order.append(name)
            return name

        return attempt

    def ask(self, name: str, priority: int = 0, lane: str = "m") -> asyncio.Task[str]:
        return asyncio.create_task(self.room.pick(lane, priority, self.take(name)))

    def free(self, seats: int = 1) -> None:
        self.seats += seats
        self.room.pump()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_room() -> None:
    bench = Bench(seats=1)
    assert await bench.ask("a") == "a"
    assert bench.line.count == 0


async def test_the_most_urgent_goes_first_and_then_the_one_who_came_first() -> None:
    bench = Bench()
    asked = []
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        asked.append(bench.ask(name, priority))
        await settle()
    bench.free(4)
    await asyncio.gather(*asked)
    assert bench.order == ["c", "a", "d", "b"]
    assert bench.line.count == 0


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    bench = Bench()
    first = bench.ask("first")
    await settle()
    bench.seats = 1
    second = bench.ask("second")
    await settle()
    assert bench.order == []
    bench.room.pump()
    await first
    assert not second.done()
    bench.free()
    await second
    assert bench.order == ["first", "second"]


async def test_a_predicted_queue_that_drains_is_noticed_without_any_event() -> None:
    bench = Bench()
    asked = bench.ask("a")
    await settle()
    bench.seats = 1
    assert await asyncio.wait_for(asked, 10) == "a"


async def test_a_full_line_refuses_with_the_time_to_come_back() -> None:
    bench = Bench(waiting_max=1)
    asked = bench.ask("a")
    await settle()
    with pytest.raises(ApiError) as caught:
        await bench.ask("b")
    assert caught.value.status == 429
    assert dict(caught.value.headers)[b"retry-after"] == b"1", "it did not try, because another one waits already"
    bench.free()
    assert await asked == "a"


async def test_a_more_urgent_request_takes_the_place_of_the_least() -> None:
    bench = Bench(waiting_max=2)
    asked = {name: bench.ask(name, priority) for name, priority in (("low", 9), ("mid", 5))}
    await settle()
    asked["high"] = bench.ask("high", -1)
    await settle()
    with pytest.raises(ApiError, match="more urgent"):
        await asked["low"]
    bench.free(2)
    await asyncio.gather(asked["mid"], asked["high"])
    assert bench.order == ["high", "mid"]


async def test_waiting_is_bounded_in_time() -> None:
    bench = Bench(timeout_s=0.05)
    with pytest.raises(ApiError, match="--queue-timeout") as caught:
        await bench.ask("a")
    assert caught.value.status == 429
    assert bench.line.count == 0
    assert not bench.room._wakes


async def test_production_stack_634_a_client_that_leaves_does_not_block_those_behind_it() -> None:
    """production-stack#634, dynamo#14507: other requests blocked behind a cancelled one."""
    bench = Bench()
    first, second = bench.ask("first"), bench.ask("second")
    await settle()
    bench.seats = 1
    bench.room.pump()
    first.cancel()
    assert await second == "second"
    assert first.cancelled()
    assert bench.line.count == 0


async def test_a_full_model_does_not_hold_up_another() -> None:
    bench = Bench()
    full = asyncio.create_task(bench.room.pick("full", 0, Bench().take("x")))
    await settle()
    bench.seats = 1
    assert await bench.ask("a", lane="other") == "a"
    full.cancel()
    with pytest.raises(asyncio.CancelledError):
        await full


async def test_an_error_while_waiting_reaches_the_client_and_frees_the_place() -> None:
    bench = Bench()
    answers = iter([SaturatedError(1.0), SaturatedError(1.0), KeyError("gone")])

    def attempt() -> str:
        raise next(answers)

    with pytest.raises(KeyError):
        await bench.room.pick("m", 0, attempt)
    assert bench.line.count == 0
