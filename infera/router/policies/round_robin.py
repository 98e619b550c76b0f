"""round-robin: each worker in turn, whatever it holds."""

from __future__ import annotations

import random

from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.place import Key
from infera.router.policies.base import BasePolicy
from infera.router.policy import PolicySettings


class RoundRobin(BasePolicy):
    """Takes the candidate that was not taken for the longest time, so joins and leaves do not disturb the turn."""

    name = "round-robin"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._last_turn: dict[Key, int] = {}
        self._turn = 0

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """The one whose last turn is longest ago; new ones come first, in the order given."""
        del demand, rng
        index = min(range(len(field)), key=lambda place: self._last_turn.get(field.place(place).key, 0))
        self._turn += 1
        self._last_turn[field.place(index).key] = self._turn
        return index

    def forget(self, key: Key) -> None:
        """A place is gone."""
        self._last_turn.pop(key, None)
