"""The books of what is under way: never negative, and empty when everything ended, whatever happened in between."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from infera.router.load import LoadTable, Ticket, TooManyRequestsError

PLACES = [("a", 0), ("a", 1), ("b", 0)]


class Books(RuleBasedStateMachine):
    """Against sums over the tickets that were not finished."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.table = LoadTable()
        self.now = 0.0
        self.live: dict[int, Ticket] = {}

    @rule(
        target=tickets,
        key=st.sampled_from(PLACES),
        prompt=st.integers(0, 10_000),
        share=st.floats(0, 1),
        streaming=st.booleans(),
    )
    def start(self, key: tuple[str, int], prompt: int, share: float, streaming: bool) -> Ticket:
        ticket = self.table.start(
            key, prompt_tokens=prompt, uncached_tokens=int(prompt * share), now_s=self.now, is_streaming=streaming
        )
        self.live[ticket.ticket_id] = ticket
        return ticket

    @rule(ticket=tickets)
    def first_token(self, ticket: Ticket) -> None:
        was_prefilling = not ticket.is_over and not ticket.is_decoding
        assert self.table.first_token(ticket) == was_prefilling

    @rule(ticket=tickets)
    def finish(self, ticket: Ticket) -> None:
        assert self.table.finish(ticket) == (self.live.pop(ticket.ticket_id, None) is not None)

    @rule(ticket=consumes(tickets))
    def finish_twice(self, ticket: Ticket) -> None:
        self.table.finish(ticket)
        self.live.pop(ticket.ticket_id, None)
        assert not self.table.finish(ticket)

    @rule(seconds=st.floats(-1, 10), speed=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]))
    def time_passes(self, seconds: float, speed: float) -> None:
        self.now += max(0.0, seconds)
        for key in PLACES:
            self.table.of(key).drain(self.now if seconds >= 0 else self.now - 5, speed)

    @invariant()
    def sums_are_right(self) -> None:
        expected: dict[tuple[str, int], list[Ticket]] = defaultdict(list)
        for ticket in self.live.values():
            expected[ticket.key].append(ticket)
        assert self.table.ticket_count == len(self.live)
        for key in PLACES:
            load, own = self.table.of(key), expected[key]
            assert load.active_requests == len(own)
            assert load.context_tokens == sum(ticket.prompt_tokens for ticket in own)
            queued = sum(ticket.remaining_tokens for ticket in own if not ticket.is_decoding)
            assert load.queued_prefill_tokens >= 0
            assert load.queued_prefill_tokens == pytest.approx(queued, abs=1e-3)

    def teardown(self) -> None:
        for ticket in self.live.values():
            assert self.table.finish(ticket)
        assert self.table.ticket_count == 0
        assert not self.table._loads


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def start(table: LoadTable, uncached: int, *, streaming: bool = True, now: float = 0.0) -> Ticket:
    return table.start(PLACES[0], prompt_tokens=uncached, uncached_tokens=uncached, now_s=now, is_streaming=streaming)


def test_load_decays_in_time_and_not_with_looks() -> None:
    table = LoadTable()
    start(table, 5000)
    load = table.of(PLACES[0])
    seen = []
    for now in (0.0, 0.0, 0.0, 0.5, 0.5, 5.0, 50.0):
        load.drain(now, 1 / 5000)
        seen.append(load.queued_prefill_tokens)
    assert seen[0] == seen[1] == seen[2] == 5000
    assert seen[3] == seen[4] == pytest.approx(2500)
    assert seen[5] == seen[6] == pytest.approx(500), "a stream without its first token is still busy"


def test_an_engine_slower_than_believed_shows_its_whole_queue() -> None:
    table = LoadTable()
    first, second = start(table, 1000), start(table, 1000)
    load = table.of(PLACES[0])
    load.drain(60.0, 1 / 5000)
    assert load.queued_prefill_tokens == pytest.approx(1100), "what came later has hardly begun"
    table.first_token(first)
    load.drain(61.0, 1 / 5000)
    assert load.queued_prefill_tokens == pytest.approx(100)
    table.finish(second)
    assert load.queued_prefill_tokens == 0


def test_an_answer_that_is_not_streamed_stops_counting_as_prefill() -> None:
    table = LoadTable()
    ticket = start(table, 5000, streaming=False)
    start(table, 1000, streaming=False)
    load = table.of(PLACES[0])
    load.drain(1.1, 1 / 5000)
    assert load.queued_prefill_tokens == pytest.approx(500)
    assert ticket.is_decoding
    assert load.context_tokens == 6000


def test_time_that_passed_before_a_request_came_does_not_count_for_it() -> None:
    table = LoadTable()
    ticket = start(table, 1000)
    table.first_token(ticket)
    start(table, 1000, now=100.0)
    load = table.of(PLACES[0])
    load.drain(100.0, 1 / 5000)
    assert load.queued_prefill_tokens == 1000


def test_requests_past_the_limit_are_refused_and_leave_no_trace() -> None:
    table = LoadTable(tickets_max=2)
    tickets = [start(table, 10), start(table, 10)]
    with pytest.raises(TooManyRequestsError):
        start(table, 10)
    for ticket in random.sample(tickets, 2):
        table.finish(ticket)
    assert table.ticket_count == 0
