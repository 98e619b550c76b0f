"""Routers of one host see each other's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infera.cachemap.load_table import LANE_LIFE_S, LoadTable
from infera.discovery.record import RankLoad
from infera.router.core import RouterCore
from tests.support.placement import STREAM, core, option, picked


def neighbours(count: int, table: LoadTable, now: float = 0.0) -> list[RouterCore]:
    routers = [core() for _ in range(count)]
    for router in routers:
        lane = table.claim()
        assert lane is not None
        router.peers.tend(table.lane(lane), {}, now)
    return routers


def queued_elsewhere(router: RouterCore, now: float = 0.0) -> Sequence[float]:
    target = option(1)
    ((queued, requests, context),) = router.peers.at([target.place.key], [0.0], now)
    return queued, requests, context


def test_a_prompt_sent_by_one_is_a_queue_for_the_other() -> None:
    one, other = neighbours(2, LoadTable())
    decision, ticket = one.pick([option(1, prompt=20_000)], STREAM, now=0.0)
    assert queued_elsewhere(other) == (20_000, 1, 20_000)
    assert picked(other, [option(1, hbm=1584), option(2)]) == "worker-2"
    one.first_token(ticket, now=1.0)
    assert queued_elsewhere(other) == (0, 1, 20_000)
    one.done(ticket, now=1.0)
    assert queued_elsewhere(other) == (0, 0, 0)
    assert decision.worker_id == "worker-1"


def test_what_failed_is_taken_back() -> None:
    one, other = neighbours(2, LoadTable())
    _, ticket = one.pick([option(1)], STREAM, now=0.0)
    one.failed(ticket, now=0.0)
    one.failed(ticket, now=0.0)
    assert queued_elsewhere(other) == (0, 0, 0)


def test_a_stopped_router_is_forgotten() -> None:
    one, other = neighbours(2, LoadTable())
    one.pick([option(1)], STREAM, now=0.0)
    assert queued_elsewhere(other, now=LANE_LIFE_S + 0.1) == (0, 0, 0)


def test_a_new_table_is_told_what_is_under_way() -> None:
    """The process that kept the table was killed, and another one made a new table."""
    one, other = neighbours(2, LoadTable())
    one.pick([option(1)], STREAM, now=0.0)
    for router in (one, other):
        router.peers.tend(None, router.loads.all(), 1.0)
    assert queued_elsewhere(other, now=1.0) == (0, 0, 0)
    table = LoadTable()
    for router in (one, other):
        lane = table.claim()
        assert lane is not None
        router.peers.tend(table.lane(lane), router.loads.all(), 2.0)
    assert queued_elsewhere(other, now=2.0) == (1600, 1, 1600)


def test_an_engine_that_reports_the_neighbours_requests_does_not_count_them_twice() -> None:
    one, other = neighbours(2, LoadTable())
    forced = replace(STREAM, is_forced=True)
    for _ in range(3):
        one.pick([option(1)], forced, now=0.0)
    other.report([option(1).place], [RankLoad(running_requests=1, waiting_requests=2)], now=0.0)
    row = other.pick([option(1)], forced, now=0.0)[0].row
    assert row.active_requests == 3
    assert row.other_prefill_tokens == 3 * 1600
