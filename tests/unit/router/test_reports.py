from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.discovery.record import RankLoad
from infera.router.busy import WINDOW_S, BusyShares
from infera.router.reports import FULL_LIFE_S, NOBODY, REPORT_LIFE_S, STALE_S, EngineReports

KEY = ("a", 0)


def reports(own: int = 0, **load: int | float | None) -> EngineReports:
    made = EngineReports()
    made.put(KEY, RankLoad(**load), own, 0.0)  # type: ignore[arg-type]
    return made


def test_what_is_ours_is_taken_out() -> None:
    others = reports(own=5, running_requests=4, waiting_requests=3).others(KEY, 0.0, 0.0)
    assert (others.running_requests, others.waiting_requests) == (0, 2)
    assert reports(own=9, running_requests=4, waiting_requests=3).others(KEY, 0.0, 0.0).waiting_requests == 0


def test_a_queue_that_is_gone_when_it_is_read_of_does_not_count() -> None:
    """Else several routers avoid the same worker at the same time, and then all come back."""
    found = reports(waiting_requests=3)
    s_per_token = STALE_S / 4_000
    assert found.others(KEY, 0.0, s_per_token).prefill_tokens == 0
    longer = reports(waiting_requests=10)
    tokens = [longer.others(KEY, age_s, s_per_token).prefill_tokens for age_s in (0.0, 0.5, 1.0, 1.5)]
    assert tokens == pytest.approx([6_000, 4_000, 2_000, 0])


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.floats(0, 30), st.sampled_from([0.0, 1e-4, 1.0]))
def test_reports_fade_and_are_never_negative(running: int, waiting: int, own: int, age_s: float, each_s: float) -> None:
    found = reports(own=own, running_requests=running, waiting_requests=waiting)
    others = found.others(KEY, age_s, each_s)
    assert min(others.running_requests, others.waiting_requests, others.prefill_tokens) >= 0
    assert others.running_requests + others.waiting_requests <= running + waiting
    if age_s >= REPORT_LIFE_S:
        assert others == NOBODY


def test_full_means_full_and_wanted() -> None:
    assert reports(kv_usage=0.99, waiting_requests=1).is_full(KEY, 0.0)
    assert not reports(kv_usage=0.99).is_full(KEY, 0.0)
    assert not reports(kv_usage=0.5, waiting_requests=1).is_full(KEY, 0.0)
    assert not reports(waiting_requests=1).is_full(KEY, 0.0)
    assert not reports(kv_usage=0.99, waiting_requests=1).is_full(KEY, FULL_LIFE_S)


def test_the_engines_own_counter_tells_how_busy_it_is() -> None:
    found = EngineReports()
    for beat in range(40):
        found.put(KEY, RankLoad(computed_tokens=1_000 * beat), 0, 2.0 * beat)
    assert found.others(KEY, 78.0, 0.001).busy_share == pytest.approx(0.5, rel=0.02)
    found.put(KEY, RankLoad(computed_tokens=5), 0, 80.0)
    assert found.others(KEY, 80.0, 0.001).busy_share == pytest.approx(0.5, rel=0.02), "a counter that went back"
    found.put(KEY, RankLoad(), 0, 82.0)
    assert found.others(KEY, 82.0, 0.001).busy_share == 0


def beats(found: EngineReports, waiting: int, tokens_per_beat: int, count: int, **more: float) -> list[float]:
    """Heartbeats every two seconds; the samples they gave."""
    samples = [
        found.put(
            KEY, RankLoad(waiting_requests=waiting, computed_tokens=tokens_per_beat * beat, **more), 0, 2.0 * beat
        )  # type: ignore[arg-type]
        for beat in range(count)
    ]
    return [sample for sample in samples if sample is not None]


def test_the_counter_of_a_busy_engine_tells_its_speed() -> None:
    """Whoever sent the work, and without any stream of ours: two seconds for 10,000 tokens."""
    assert beats(EngineReports(), waiting=3, tokens_per_beat=10_000, count=10) == [2 / 10_000] * 3


def test_the_counter_says_nothing_while_the_engine_may_have_rested() -> None:
    assert beats(EngineReports(), waiting=0, tokens_per_beat=10_000, count=10) == []
    assert beats(EngineReports(), waiting=3, tokens_per_beat=100, count=10) == [], "too few tokens"
    assert beats(EngineReports(), waiting=3, tokens_per_beat=10_000, count=10, kv_usage=0.99) == [], "memory decides"
    found = EngineReports()
    for beat in range(20):
        load = RankLoad(waiting_requests=beat % 2, computed_tokens=10_000 * beat)
        assert found.put(KEY, load, 0, 2.0 * beat) is None, "a pause between any two"


def test_a_silence_or_a_restarted_counter_begins_a_new_stretch() -> None:
    found = EngineReports()
    found.put(KEY, RankLoad(waiting_requests=1, computed_tokens=0), 0, 0.0)
    assert found.put(KEY, RankLoad(waiting_requests=1, computed_tokens=50_000), 0, REPORT_LIFE_S) is None
    assert found.put(KEY, RankLoad(waiting_requests=1, computed_tokens=7), 0, REPORT_LIFE_S + 6) is None


def test_busy_shares_approach_the_load_and_decay_in_time() -> None:
    shares = BusyShares()
    for second in range(300):
        shares.add(KEY, 0.6, float(second))
    assert shares.share(KEY, 300.0) == pytest.approx(0.6, rel=0.05)
    looks = [shares.share(KEY, 300.0) for _ in range(5)]
    assert len(set(looks)) == 1
    assert shares.share(KEY, 300.0 + 10 * WINDOW_S) < 0.001
    shares.forget(KEY)
    assert shares.share(KEY, 300.0) == 0
