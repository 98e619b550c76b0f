"""kv-aware: the worker whose predicted time to the first token is least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from infera.router.cost import PRIOR, Candidate, CostPrior, predict_cost
from infera.router.policy import Choice

# Closer than this, the prediction cannot tell two workers apart; several routers must not all take the same one.
TIE_S: Final = 0.001
TIE_SHARE: Final = 0.02


class KvAware:
    """Weighs queue, missing prompt tokens, loads from lower tiers and decode pressure, all in seconds."""

    name = "kv-aware"
    reads_prefixes = True

    def __init__(self, prior: CostPrior = PRIOR) -> None:
        self._prior = prior

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The cheapest; at random among those that are as good as the cheapest."""
        costs = tuple(predict_cost(candidate, self._prior) for candidate in candidates)
        best_s = min(cost.total_s for cost in costs)
        limit_s = best_s + max(TIE_S, TIE_SHARE * best_s)
        tied = [index for index, cost in enumerate(costs) if cost.total_s <= limit_s]
        # Among equals the one that computes least: a tie in time is not a tie in work.
        fewest = min(candidates[index].uncached_tokens for index in tied)
        return Choice(rng.choice([index for index in tied if candidates[index].uncached_tokens == fewest]), costs)
