"""What engines say about their own load, and what of it is not ours.

An engine counts everybody's requests: this router's, other routers', direct ones. What this router sent it knows
better itself, so only the rest is taken from the report. A report loses weight with its age, in time.

While requests wait at every report, the engine is busy throughout, and its counter of computed tokens tells how fast it
is, whoever sent the work and whether or not answers are streamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infera.discovery.record import RankLoad
from infera.router.place import Key

REPORT_LIFE_S: Final = 10.0
# A waiting request of somebody else's is assumed to have this many tokens until our own tell more.
REQUEST_TOKENS_PRIOR: Final = 1_000.0
MEAN_SHARE: Final = 0.02
# On top of its age, a report is taken to be this much older: half the time between two heartbeats. A queue that is
# worked off by then says nothing about now, and several routers that all react to it chase each other around the fleet.
STALE_S: Final = 1.0
RATE_WINDOW_S: Final = 15.0
# The counter goes up by whole prompts, so a stretch has to hold several.
STRETCH_S_MIN: Final = 5.0
STRETCH_TOKENS_MIN: Final = 4_096
KV_FULL: Final = 0.95
# A full memory can be free again at any moment, so only a report of about the last two heartbeats counts.
FULL_LIFE_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class Others:
    """What others have at a place, now."""

    waiting_requests: float = 0.0
    running_requests: float = 0.0
    prefill_tokens: float = 0.0
    busy_share: float = 0.0
    """Share of time its engine lately spent on prompts, whoever sent them; 0 where it does not say."""
    kv_usage: float | None = None
    """Share of the KV memory in use (0 to 1), by everybody; None when not known, or when nobody else has requests."""


NOBODY: Final = Others()


@dataclass(frozen=True, slots=True)
class _Report:
    load: RankLoad
    own_requests: int
    received_s: float
    computed_tokens_per_s: float
    busy_since: tuple[float, int] | None
    """When requests began to wait at every report, and the counter of computed tokens then."""


class EngineReports:
    """The last report of each place."""

    def __init__(self) -> None:
        self._reports: dict[Key, _Report] = {}
        self._mean_tokens = REQUEST_TOKENS_PRIOR

    def note_request(self, uncached_tokens: int) -> None:
        """Learn how large requests are."""
        self._mean_tokens += MEAN_SHARE * (uncached_tokens - self._mean_tokens)

    def put(self, key: Key, load: RankLoad, own_requests: int, now_s: float) -> float | None:
        """A report came; ``own_requests`` of ours are under way there at this moment.

        Returns the seconds per prompt token that it shows, when it shows any.
        """
        before = self._reports.get(key)
        found, busy_since = _measured(before, load, now_s)
        rate = _rate(before, load, now_s)
        self._reports[key] = _Report(load, own_requests, now_s, rate, busy_since)
        return found

    def last(self, key: Key) -> RankLoad | None:
        """The last report, however old."""
        report = self._reports.get(key)
        return report.load if report is not None else None

    def others(self, key: Key, now_s: float, s_per_token: float) -> Others:
        """What others have at a place. Their queue drains with the report's age, then the report ends."""
        report = self._reports.get(key)
        if report is None:
            return NOBODY
        age_s = max(0.0, now_s - report.received_s)
        if age_s >= REPORT_LIFE_S:
            return NOBODY
        load = report.load
        fresh = 1.0 - age_s / REPORT_LIFE_S
        requests = max(0, load.running_requests + load.waiting_requests - report.own_requests)
        waiting = min(load.waiting_requests, requests)
        drained = (STALE_S + age_s) / s_per_token if s_per_token > 0 else 0.0
        return Others(
            waiting_requests=waiting * fresh,
            running_requests=(requests - waiting) * fresh,
            prefill_tokens=max(0.0, waiting * self._mean_tokens - drained),
            busy_share=report.computed_tokens_per_s * s_per_token,
            # Of our own requests we know better what they hold, and when they ended.
            kv_usage=load.kv_usage if requests else None,
        )

    def has_others_waiting(self, key: Key, now_s: float) -> bool:
        """Whether somebody else's requests wait there, by the last report."""
        return self.others(key, now_s, 0.0).waiting_requests > 0

    def is_full(self, key: Key, now_s: float) -> bool:
        """Whether the engine says that its memory is full and requests wait for it."""
        report = self._reports.get(key)
        if report is None or now_s - report.received_s >= FULL_LIFE_S:
            return False
        usage = report.load.kv_usage
        return usage is not None and usage >= KV_FULL and report.load.waiting_requests > 0

    def forget(self, key: Key) -> None:
        """A place is gone."""
        self._reports.pop(key, None)


def _measured(before: _Report | None, load: RankLoad, now_s: float) -> tuple[float | None, tuple[float, int] | None]:
    """Seconds per token of a stretch without a pause, if that was long enough; and where the next one begins."""
    is_full = load.kv_usage is not None and load.kv_usage >= KV_FULL
    if load.computed_tokens is None or load.waiting_requests == 0 or is_full:
        return None, None
    began = before.busy_since if before is not None and now_s - before.received_s < REPORT_LIFE_S else None
    if began is None or load.computed_tokens < began[1]:
        return None, (now_s, load.computed_tokens)
    elapsed_s, tokens = now_s - began[0], load.computed_tokens - began[1]
    if elapsed_s < STRETCH_S_MIN or tokens < STRETCH_TOKENS_MIN:
        return None, began
    return elapsed_s / tokens, (now_s, load.computed_tokens)


def _rate(before: _Report | None, load: RankLoad, now_s: float) -> float:
    """Prompt tokens computed per second, smoothed over about RATE_WINDOW_S; 0 until two reports told."""
    if before is None or load.computed_tokens is None or before.load.computed_tokens is None:
        return 0.0
    elapsed_s = now_s - before.received_s
    more = load.computed_tokens - before.load.computed_tokens
    if elapsed_s <= 0 or more < 0:
        return before.computed_tokens_per_s
    keep = math.exp(-elapsed_s / RATE_WINDOW_S)
    return keep * before.computed_tokens_per_s + (1 - keep) * more / elapsed_s


def merged(loads: Sequence[RankLoad]) -> RankLoad | None:
    """All ranks as one; None when there are none."""
    if len(loads) <= 1:
        return loads[0] if loads else None
    usages = [load.kv_usage for load in loads if load.kv_usage is not None]
    computed = [load.computed_tokens for load in loads if load.computed_tokens is not None]
    return RankLoad(
        running_requests=sum(load.running_requests for load in loads),
        waiting_requests=sum(load.waiting_requests for load in loads),
        kv_usage=max(usages, default=None),
        computed_tokens=sum(computed) if computed else None,
    )
