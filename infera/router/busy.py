"""How busy each place was lately with prompts this router sent it: the share of time spent computing them.

A queue says what is waiting now; this says what will come. Whoever computes a prompt at a busy place delays those who
come after it, and at an idle place nobody: that is what makes a router use an idle worker, although for the one
request at hand a busy one that holds some of its prompt would be as quick.
"""

from __future__ import annotations

import math
from typing import Final

from infera.router.place import Key

WINDOW_S: Final = 30.0


class BusyShares:
    """A sum for each place that decays with time, not with picks."""

    def __init__(self) -> None:
        self._work: dict[Key, tuple[float, float]] = {}

    def add(self, key: Key, work_s: float, now_s: float) -> None:
        """Work was sent to a place."""
        self._work[key] = (self.share(key, now_s) * WINDOW_S + work_s, now_s)

    def share(self, key: Key, now_s: float) -> float:
        """0 for a place that had nothing to do; about 1 for one that never rests; more when it cannot keep up."""
        found = self._work.get(key)
        if found is None:
            return 0.0
        work_s, since_s = found
        return work_s / WINDOW_S * math.exp(-max(0.0, now_s - since_s) / WINDOW_S)

    def forget(self, key: Key) -> None:
        """A place is gone."""
        self._work.pop(key, None)
