"""random: any worker, each as likely as the next."""

from __future__ import annotations

import random

from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.policies.base import BasePolicy


class RandomChoice(BasePolicy):
    """The baseline others are measured against."""

    name = "random"

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """Any of them."""
        del demand
        return rng.randrange(len(field))
