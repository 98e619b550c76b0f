"""round-robin: each worker in turn, whatever it holds."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from infera.router.cost import Candidate
from infera.router.policy import Choice

REMEMBERED_MAX: Final = 16_384


class RoundRobin:
    """Takes the candidate that was not taken for the longest time, so joins and leaves do not disturb the turn."""

    name = "round-robin"
    reads_prefixes = False

    def __init__(self) -> None:
        self._last_turn: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The one whose last turn is longest ago; new ones come first, in the order given."""
        del rng
        index = min(range(len(candidates)), key=lambda place: self._last_turn.get(_key(candidates[place]), 0))
        self._turn += 1
        key = _key(candidates[index])
        self._last_turn[key] = self._turn
        self._last_turn.move_to_end(key)
        while len(self._last_turn) > REMEMBERED_MAX:
            self._last_turn.popitem(last=False)
        return Choice(index)


def _key(candidate: Candidate) -> tuple[str, int]:
    return candidate.worker, candidate.dp_rank
