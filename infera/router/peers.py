"""What other routers have under way at the same places, and what they are told of ours.

Several routers that place by load without knowing of each other send to the same idle place at once, and each sees a
share of every queue. With a lane of the host's load table (``infera.cachemap.load_table``) each sees all of it, at
the moment of the pick. Without one (the ingest process is down, or this router is alone) there is nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from infera.cachemap.load_table import LoadLane, PlaceSum, place_number
from infera.router.load import PlaceLoad
from infera.router.place import Key

NOTHING: Final = PlaceSum(0.0, 0.0, 0.0)
NUMBERS_MAX: Final = 65_536
"""Places whose numbers are kept; they cost a hash each to find again."""


class Peers:
    """The other routers. ``lane`` comes and goes with the process that keeps the table."""

    def __init__(self) -> None:
        self.lane: LoadLane | None = None
        self._numbers: dict[Key, int] = {}

    def tend(self, lane: LoadLane | None, loads: Mapping[Key, PlaceLoad], now_s: float) -> None:
        """To be called every BEAT_INTERVAL_S with the lane that is there now and what is under way."""
        if lane is not self.lane:
            self.lane = lane
            for key, load in loads.items():
                self.tell(key, load, now_s)
        if lane is not None:
            lane.beat(now_s)

    def tell(self, key: Key, load: PlaceLoad, now_s: float) -> None:
        """What we have at a place changed."""
        if self.lane is not None:
            own = PlaceSum(load.queued_prefill_tokens, load.active_requests, load.context_tokens)
            self.lane.put(self._number(key), own, load.drainable_tokens, now_s)

    def at(self, keys: Sequence[Key], s_per_token: Sequence[float], now_s: float) -> Sequence[PlaceSum]:
        """What the others have at each place; their queues drain at ``s_per_token``."""
        if self.lane is None or self.lane.live_count(now_s) <= 1:
            return (NOTHING,) * len(keys)
        return self.lane.others([self._number(key) for key in keys], s_per_token, now_s)

    def forget(self, key: Key) -> None:
        """A place is gone."""
        self._numbers.pop(key, None)

    def _number(self, key: Key) -> int:
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= NUMBERS_MAX:
                self._numbers.clear()
            number = self._numbers[key] = place_number(*key)
        return number
