from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.router.cost import PRIOR
from infera.router.load import LoadTable, PlaceLoad, Ticket
from infera.router.measure import SAMPLE_TOKENS_MIN, SpeedMeter
from infera.router.place import Place
from infera.router.speed import FACTOR_DECAY_S, KINDS_MAX, SpeedBook
from tests.support.records import record

PRIOR_S = PRIOR.prefill_s_per_token


def place(number: int, **fields: str) -> Place:
    return Place(record(number, **fields))


def key(number: int) -> tuple[str, int]:
    return place(number).key


def taught(samples: dict[int, float], count: int = 5) -> SpeedBook:
    book = SpeedBook()
    for turn in range(count):
        for number, s_per_token in samples.items():
            book.learn(place(number), s_per_token, float(turn))
    return book


def test_without_samples_the_built_in_prior_holds() -> None:
    book = SpeedBook()
    book.learn(place(1), PRIOR_S / 7, 0.0)
    assert book.s_per_token(place(1), 0.0) == PRIOR_S, "one sample is not enough"


def test_a_kind_is_as_fast_as_its_middle_worker() -> None:
    book = taught({1: 0.001, 2: 0.0011, 3: 0.009})
    assert book.prior_s_per_token(place(4).kind) == 0.0011, "a worker never seen is taken for like its kind"
    assert book.prior_s_per_token(place(4, engine="other").kind) == PRIOR_S
    assert book.prior_s_per_token(place(4, hardware="other").kind) == PRIOR_S
    assert book.prior_s_per_token(place(4, model="other").kind) == PRIOR_S


def test_of_two_workers_the_slow_one_does_not_move_the_prior() -> None:
    book = taught({1: 0.001, 2: 0.004})
    assert book.prior_s_per_token(place(1).kind) == 0.001
    assert book.factor(key(2), 4.0) == 2.0, "clamped"
    assert book.factor(key(1), 4.0) == 1.0


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e4)),
                max_size=60), st.floats(0, 1e5))  # fmt: skip
def test_a_factor_never_leaves_its_bounds(samples: list[tuple[int, float, float]], later: float) -> None:
    book = SpeedBook()
    for number, value, now in samples:
        book.learn(place(number), value, now)
        for each in range(1, 5):
            assert 0.5 <= book.factor(key(each), now) <= 2.0
            assert 0.5 <= book.factor(key(each), later) <= 2.0
            assert 0 < book.s_per_token(place(each), later) < math.inf


def test_a_factor_decays_to_one_when_nothing_is_observed() -> None:
    book = taught({1: 0.001, 2: 0.001, 3: 0.002})
    factors = [book.factor(key(3), 4.0 + FACTOR_DECAY_S * times) for times in range(6)]
    assert factors[0] == pytest.approx(2.0)
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.01


def test_one_odd_sample_changes_nothing() -> None:
    book = taught({1: 0.001, 2: 0.001}, count=9)
    book.learn(place(1), 5.0, 9.0)
    assert book.factor(key(1), 9.0) == pytest.approx(1.0)


def test_what_is_gone_is_forgotten_but_not_its_kind() -> None:
    book = taught({1: 0.003})
    book.forget(key(1))
    assert book.factor(key(1), 5.0) == 1.0
    assert book.prior_s_per_token(place(2).kind) == 0.003
    assert not book._workers


def test_kinds_are_bounded() -> None:
    book = SpeedBook()
    for number in range(1, KINDS_MAX + 50):
        for _ in range(3):
            book.learn(place(number, model=f"m{number}"), 0.01, 0.0)
    assert len(book._kinds) == KINDS_MAX
    assert len(book._workers) == KINDS_MAX
    assert book.factor(key(1), 0.0) == 1.0


def run(steps: list[tuple[float, int, bool]], *, ends_early: int | None = None) -> list[float]:
    """Prompts sent together at 0 and their first tokens one after the other: (time, tokens, is clean)."""
    table, meter = LoadTable(), SpeedMeter()
    tickets: list[Ticket] = []
    for _, tokens, is_clean in steps:
        ticket = table.start(
            key(1), prompt_tokens=tokens, uncached_tokens=tokens, now_s=0.0, is_streaming=True, is_clean=is_clean
        )
        tickets.append(ticket)
        meter.sent(ticket, table.of(key(1)), 0.0)
    found = []
    for number, ((time_s, _, _), ticket) in enumerate(zip(steps, tickets, strict=True)):
        if number == ends_early:
            table.finish(ticket)
            meter.over(ticket, table.of(key(1)))
            continue
        table.first_token(ticket)
        sample = meter.first_token(ticket, table.of(key(1)), time_s)
        if sample is not None:
            found.append(sample)
    assert not meter._stretches, "a stretch ends when nothing is left to compute"
    return found


def test_a_busy_stretch_is_a_sample() -> None:
    assert run([(2.0, 2048, True), (3.0, 1024, True)]) == [2.0 / 2048, 1.0 / 1024]


def test_prompts_computed_together_are_measured_together() -> None:
    assert run([(1.0, 512, True), (1.0, 512, True), (1.5, 512, True)]) == [1.0 / 1024]


def test_short_stretches_measure_the_network_and_are_left_out() -> None:
    assert run([(1.0, SAMPLE_TOKENS_MIN - 1, True)]) == []


def test_a_stretch_that_is_not_wholly_known_is_left_out() -> None:
    assert run([(2.0, 2048, False)]) == []
    assert run([(2.0, 2048, True), (3.0, 2048, False)]) == []
    assert run([(1.0, 2048, True), (2.0, 2048, True)], ends_early=0) == []


def test_a_stretch_begins_with_the_first_request_after_a_pause() -> None:
    table, meter = LoadTable(), SpeedMeter()
    for sent_s in (0.0, 100.0):
        ticket = table.start(key(1), prompt_tokens=2000, uncached_tokens=2000, now_s=sent_s, is_streaming=True)
        meter.sent(ticket, table.of(key(1)), sent_s)
        table.first_token(ticket)
        assert meter.first_token(ticket, PlaceLoad(), sent_s + 1.0) == pytest.approx(1 / 2000)
