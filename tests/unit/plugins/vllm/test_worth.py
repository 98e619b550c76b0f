"""Hits that would lose against computing are not loaded, but never for good."""

from __future__ import annotations

import pytest
from infera_vllm.worth import ALWAYS_VARIABLE, EXPLORE_EVERY, LoadWorth

MIB = 1 << 20


def measured(tokens_per_s: float, bytes_per_s: float) -> LoadWorth:
    worth = LoadWorth(always=False)
    worth.computed(1000, 1000 / tokens_per_s)
    worth.loaded(MIB, MIB / bytes_per_s)
    return worth


def test_as_long_as_nothing_is_known_hits_are_loaded() -> None:
    worth = LoadWorth(always=False)
    assert worth.is_worth(16, 10**12)
    worth.computed(1000, 0.1)
    assert worth.is_worth(16, 10**12)


def test_the_faster_way_is_taken() -> None:
    worth = measured(tokens_per_s=10_000, bytes_per_s=10**9)
    assert worth.is_worth(1000, 10 * MIB)
    assert not worth.is_worth(1000, 1000 * MIB)


def test_short_hits_are_skipped() -> None:
    worth = measured(tokens_per_s=100_000, bytes_per_s=10**10)
    assert not worth.is_worth(32, 1000)
    assert worth.is_worth(32_000, 1000)


def test_a_speed_measured_in_a_bad_moment_does_not_hold_for_ever() -> None:
    worth = measured(tokens_per_s=10_000, bytes_per_s=10**4)
    tried = [worth.is_worth(1000, MIB) for _ in range(2 * EXPLORE_EVERY)]
    assert tried.count(True) == 2
    for _ in range(30):
        worth.loaded(MIB, MIB / 10**9)
    assert worth.is_worth(1000, MIB)


def test_samples_that_say_nothing_are_left_out() -> None:
    worth = LoadWorth(always=False)
    worth.computed(10, 1.0)
    worth.loaded(100, 1.0)
    worth.computed(1000, 0.0)
    assert worth.is_worth(1, 10**12)


def test_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALWAYS_VARIABLE, "always")
    worth = LoadWorth.from_environment()
    worth.computed(1000, 1e-6)
    worth.loaded(MIB, 100.0)
    assert worth.is_worth(16, 10**12)
    monkeypatch.setenv(ALWAYS_VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="always or auto"):
        LoadWorth.from_environment()
