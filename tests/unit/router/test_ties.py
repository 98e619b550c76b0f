from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infera.router.ties import TIE_S, TIE_SHARE, cheapest


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_nobody_clearly_worse_is_taken(costs: list[float], dice: random.Random) -> None:
    best = min(costs)
    assert costs[cheapest(costs, dice)] <= best + max(TIE_S, TIE_SHARE * best)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=20), st.integers())
def test_among_equals_the_preferred_one(given_costs: list[tuple[float, int]], seed: int) -> None:
    costs = [cost for cost, _ in given_costs]
    limit = min(costs) + max(TIE_S, TIE_SHARE * min(costs))
    chosen = cheapest(costs, random.Random(seed), prefer=lambda index: given_costs[index][1])
    assert given_costs[chosen][1] == min(wish for cost, wish in given_costs if cost <= limit)


def test_all_equals_have_their_turn() -> None:
    dice = random.Random(1)
    counts = Counter(cheapest([1.0, 1.01, 1.019, 1.5], dice) for _ in range(300))
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 60
