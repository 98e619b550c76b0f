from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.discovery.record import RankLoad
from infera.router.affinity import SessionTable
from infera.router.core import NoWorkerError, RouterCore, SaturatedError
from infera.router.load import Ticket
from infera.router.place import Option
from tests.support.placement import STREAM, core, option, picked

SESSION = replace(STREAM, session=b"s")


def send(router: RouterCore, target: Option, now: float = 0.0) -> Ticket:
    """A request under way."""
    return router.pick([target], replace(STREAM, is_forced=True), now=now)[1]


def test_the_worker_that_holds_the_prefix_is_picked() -> None:
    assert picked(core(), [option(1), option(2, hbm=1584), option(3, hbm=800)]) == "worker-2"


def test_memory_beats_nothing_and_hbm_beats_memory() -> None:
    assert picked(core(), [option(1), option(2, ram=1584)]) == "worker-2"
    assert picked(core(), [option(1, hbm=1584), option(2, ram=1584)]) == "worker-1"


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    router = core()
    send(router, option(1, prompt=20_000))
    assert picked(router, [option(1, hbm=1584), option(2)]) == "worker-2"


def test_equals_are_shared_at_random() -> None:
    router = core()
    counts = Counter(picked(router, [option(1), option(2), option(3)], now=1e3 * turn) for turn in range(400))
    assert len(counts) == 3
    assert min(counts.values()) > 80


def test_suspects_are_used_only_when_nobody_else_is_there() -> None:
    assert picked(core(), [option(1, suspect=True, hbm=1584), option(2)]) == "worker-2"
    assert picked(core(), [option(1, suspect=True)]) == "worker-1"


def test_nobody_to_pick() -> None:
    with pytest.raises(NoWorkerError):
        picked(core(), [])


def test_load_is_counted_from_pick_to_end_and_released_once() -> None:
    router = core()
    ticket = send(router, option(1, hbm=1000))
    load = router.loads.of(ticket.key)
    assert (load.active_requests, load.queued_prefill_tokens) == (1, 600)
    router.first_token(ticket, now=0.1)
    assert (load.queued_prefill_tokens, load.context_tokens) == (0, 1600)
    router.done(ticket, now=0.2)
    router.failed(ticket, now=0.2)
    router.first_token(ticket, now=0.3)
    assert router.loads.ticket_count == 0
    assert router.loads.of(ticket.key).active_requests == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["pick", "first", "done", "failed", "forget", "unary"]),
                          st.integers(0, 20)), max_size=60))  # fmt: skip
def test_whatever_happens_everything_is_released(steps: list[tuple[int, str, int]]) -> None:
    """Client gone, worker failed, worker left while requests run, tokens after the end: the books close at zero."""
    router = core(sessions=SessionTable("both"))
    tickets: list[Ticket] = []
    for now, (number, action, which) in enumerate(steps):
        if action in ("pick", "unary"):
            demand = replace(STREAM, session=b"%d" % which, is_streaming=action == "pick")
            tickets.append(router.pick([option(number), option(4)], demand, now=now)[1])
        elif action == "forget":
            router.forget([option(number).place])
        elif tickets:
            ticket = tickets[which % len(tickets)]
            {"first": router.first_token, "done": router.done, "failed": router.failed}[action](ticket, now=now)
    for ticket in tickets:
        router.done(ticket, now=1e4)
    assert router.loads.ticket_count == 0
    assert not router._sent
    assert not router._meter._stretches
    assert router.sessions.active_leases["mixed"] == 0


def test_engines_reports_of_others_requests_count() -> None:
    router = core()
    router.report([option(1).place], [RankLoad(running_requests=4, waiting_requests=40)], now=0.0)
    assert picked(router, [option(1, hbm=160), option(2)]) == "worker-2"
    assert picked(router, [option(1, hbm=160), option(2)], now=60.0) == "worker-1", "an old report says nothing"


def test_own_requests_in_a_report_are_not_counted_twice() -> None:
    router = core()
    tickets = [send(router, option(1)) for _ in range(5)]
    router.report([option(1).place], [RankLoad(running_requests=1, waiting_requests=4)], now=0.0)
    decision, _ = router.pick([option(1)], STREAM, now=0.0)
    assert decision.row.other_prefill_tokens == 0
    assert decision.row.active_requests == len(tickets)


def test_a_full_memory_that_others_wait_for_saturates() -> None:
    router = core()
    full = [RankLoad(running_requests=9, waiting_requests=2, kv_usage=0.99)]
    router.report([option(1).place], full, now=0.0)
    assert picked(router, [option(1, hbm=1584), option(2)]) == "worker-2"
    with pytest.raises(SaturatedError):
        router.pick([option(1)], STREAM, now=0.0)
    assert picked(router, [option(1)], now=9.0) == "worker-1"


def test_an_assumed_speed_refuses_nobody() -> None:
    """An engine ten times as fast as assumed, whose answers are not streamed, has long queues on paper only."""
    router = core()
    for turn in range(200):
        router.pick([option(1)], replace(STREAM, is_streaming=False), now=turn / 1_000)
    assert router.loads.of(option(1).place.key).queued_prefill_tokens > 300_000


def test_an_engine_whose_answers_are_not_streamed_is_measured_by_its_counter() -> None:
    router = core()
    for beat in range(20):
        load = RankLoad(running_requests=8, waiting_requests=5, computed_tokens=100_000 * beat)
        router.report([option(1).place], [load], now=2.0 * beat)
    assert router.speeds.prior_s_per_token(option(9).place.kind) == pytest.approx(2 / 100_000)


def test_ranks_without_places_of_their_own_are_summed_up() -> None:
    router = core()
    ranks = [RankLoad(dp_rank=rank, running_requests=2, waiting_requests=3, kv_usage=rank / 4) for rank in range(3)]
    router.report([option(1).place], ranks, now=0.0)
    assert router.reports.last(option(1).place.key) == RankLoad(running_requests=6, waiting_requests=9, kv_usage=0.5)
    router.report([option(2, rank=0).place, option(2, rank=2).place], ranks, now=0.0)
    assert router.reports.last(option(2, rank=2).place.key) == ranks[2]
    assert router.reports.last(option(2, rank=1).place.key) is None


def test_when_all_are_saturated_requests_wait_but_not_those_that_must_not() -> None:
    router = core(saturation_s=1.0)
    for number in (1, 2):
        send(router, option(number, prompt=20_000))
    router.done(router.pick([option(1), option(2)], STREAM, now=0.0)[1], now=0.0)
    for turn in range(3):
        router.speeds.learn(option(1).place, 1 / 5_000, turn)
    both = [option(1), option(2)]
    with pytest.raises(SaturatedError) as caught:
        router.pick(both, STREAM, now=0.0)
    assert caught.value.free_in_s == pytest.approx(3.0)
    assert router.loads.ticket_count == 2
    for demand in (replace(STREAM, is_retry=True), replace(STREAM, is_forced=True)):
        router.done(router.pick(both, demand, now=0.0)[1], now=0.0)


def test_who_was_passed_over_is_said_with_the_reason() -> None:
    router = core()
    full = RankLoad(waiting_requests=2, kv_usage=0.99)
    router.report([option(2).place], [full], now=0.0)
    decision, _ = router.pick([option(1), option(2), option(3, suspect=True)], STREAM, now=0.0)
    assert [entry["worker"] for entry in decision.explain()["candidates"]] == ["worker-1"]
    assert decision.explain()["passed_over"] == [
        {"worker": "worker-2", "dp_rank": 0, "reason": "saturated"},
        {"worker": "worker-3", "dp_rank": 0, "reason": "suspect"},
    ]


def test_a_session_stays_where_it_was_whatever_it_costs() -> None:
    router = core(sessions=SessionTable("both"))
    first = picked(router, [option(1), option(2)], demand=SESSION)
    other = 3 - int(first[-1])
    for now in range(20):
        options = [option(other, hbm=1584), option(int(first[-1]))]
        decision, ticket = router.pick(options, SESSION, now=now)
        assert (decision.worker_id, decision.reason) == (first, "session")
        router.done(ticket, now=now)
    assert router.sessions.counts["hits", "mixed"] == 20
    assert router.sessions.counts["selected", "mixed"] == 1


def test_a_bound_request_still_counts_as_load_and_looks_at_the_cache() -> None:
    router = core(sessions=SessionTable("both"))
    picked(router, [option(1)], demand=SESSION)
    decision, ticket = router.pick([option(1, hbm=800), option(2)], SESSION, now=0.0)
    assert decision.cached_tokens == 800
    assert len(decision.field) == 2
    assert router.loads.of(ticket.key).queued_prefill_tokens == 800


def test_a_session_whose_worker_is_gone_or_suspect_is_bound_anew() -> None:
    router = core(sessions=SessionTable("both"))
    assert picked(router, [option(1)], demand=SESSION) == "worker-1"
    assert picked(router, [option(2)], demand=SESSION) == "worker-2"
    assert picked(router, [option(1), option(2, suspect=True)], demand=SESSION) == "worker-1"
    assert router.sessions.counts["selected", "mixed"] == 3


def test_a_failure_ends_the_binding_and_a_client_that_leaves_does_not() -> None:
    router = core(sessions=SessionTable("both"))
    _, ticket = router.pick([option(1)], SESSION, now=0.0)
    router.done(ticket, now=0.0)
    assert len(router.sessions) == 1
    _, ticket = router.pick([option(1)], SESSION, now=0.0)
    router.failed(ticket, now=0.0)
    assert len(router.sessions) == 0


def test_without_the_mode_or_the_header_sessions_are_ignored() -> None:
    router = core(sessions=SessionTable("prefill"))
    picked(router, [option(1)], demand=SESSION)
    picked(router, [option(1)], demand=replace(SESSION, role="decode"))
    assert len(router.sessions) == 0
    picked(router, [option(1)], demand=replace(SESSION, role="prefill"))
    assert len(router.sessions) == 1


def test_a_forced_worker_changes_no_binding() -> None:
    router = core(sessions=SessionTable("both"))
    picked(router, [option(1)], demand=SESSION)
    assert picked(router, [option(2)], demand=replace(SESSION, is_forced=True)) == "worker-2"
    assert picked(router, [option(1), option(2)], demand=SESSION) == "worker-1"


def test_ranks_are_places_of_their_own() -> None:
    router = core()
    send(router, option(1, rank=0, prompt=20_000))
    decision, _ = router.pick([option(1, rank=0), option(1, rank=1)], STREAM, now=0.0)
    assert decision.dp_rank == 1


def test_a_decision_explains_itself() -> None:
    decision, _ = core().pick([option(1), option(2, hbm=160, ram=320)], STREAM, now=0.0)
    told = decision.explain()
    assert (told["chosen"], told["reason"]) == ("worker-2", "kv-aware")
    second = told["candidates"][1]
    assert second["cached_tokens"] == {"hbm": 160, "ram": 320}
    assert second["predicted_s"]["total"] == pytest.approx(sum(second["predicted_s"].values()) / 2, abs=1e-5)
