"""Choosing among places that the prediction cannot tell apart.

At random: several routers without shared state see the same fleet and must not all take the same place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

TIE_S: Final = 0.001
TIE_SHARE: Final = 0.02


def cheapest(costs_s: Sequence[float], rng: random.Random, prefer: Callable[[int], float] | None = None) -> int:
    """The index of the least cost; among those as good as it, one of the least ``prefer``, at random."""
    best_s = min(costs_s)
    limit_s = best_s + max(TIE_S, TIE_SHARE * best_s)
    tied = [index for index, cost_s in enumerate(costs_s) if cost_s <= limit_s]
    if len(tied) > 1 and prefer is not None:
        wanted = {index: prefer(index) for index in tied}
        least = min(wanted.values())
        tied = [index for index in tied if wanted[index] <= least]
    return tied[0] if len(tied) == 1 else rng.choice(tied)
