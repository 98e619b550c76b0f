"""kv-aware: the worker whose predicted time to the first token is least."""

from __future__ import annotations

import random

from infera.discovery.record import ROLES, Role
from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.policies.base import BasePolicy
from infera.router.policy import PolicySettings
from infera.router.scoring import Weights
from infera.router.ties import cheapest


class KvAware(BasePolicy):
    """Weighs queue, missing prompt tokens, loads from lower tiers and decode pressure, all in seconds."""

    name = "kv-aware"
    reads_prefixes = True
    reads_text = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._weights = {role: Weights(overlap=self.settings.overlap.of(role)) for role in ROLES}

    def weights(self, role: Role) -> Weights:
        """The overlap weight biases what a worker holds against how loaded it is."""
        return self._weights[role]

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """The cheapest; at random among those that are as good as the cheapest."""
        weights = self._weights[demand.role]
        costs = field.costs(weights)
        if weights.overlap == 0:
            return cheapest(costs.cost_s, rng)
        # Among equals the one that computes least: a tie in time is not a tie in work.
        return cheapest(costs.cost_s, rng, prefer=lambda index: field.row(index).uncached_tokens)
