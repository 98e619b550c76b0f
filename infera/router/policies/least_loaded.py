"""least-loaded: the worker with the shortest queue and the least decoding, whatever it holds."""

from __future__ import annotations

import random
from typing import Final

from infera.discovery.record import Role
from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.policies.base import BasePolicy
from infera.router.scoring import Weights
from infera.router.ties import cheapest

WEIGHTS: Final = Weights(overlap=0.0)


class LeastLoaded(BasePolicy):
    """The predicted cost without the request's own part."""

    name = "least-loaded"

    def weights(self, role: Role) -> Weights:
        """What is held does not count."""
        del role
        return WEIGHTS

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """The least loaded, at random among equals."""
        del demand
        return cheapest(field.costs(WEIGHTS).cost_s, rng)
