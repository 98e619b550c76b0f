"""Finds the samples of prefill speed that can be trusted.

While a place has prompts to compute it is busy, and what it computed over the time that took is its speed, however
the engine batches. A stretch counts only when all of it is known: every request streamed (else the end of its
prefill is not seen), none was tried elsewhere before, nothing was loaded from a lower tier, nobody else's requests
were waiting there, and none ended without a first token. Short stretches measure the network, so they are left out.

Where other routers of this host had sent prompts before it, a request's own wait is the sample: it went by while those
and its own prompt were computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from infera.router.load import PlaceLoad, Ticket
from infera.router.place import Key

SAMPLE_TOKENS_MIN: Final = 1_024
STRETCH_S_MAX: Final = 600.0


@dataclass(slots=True)
class _Stretch:
    began_s: float
    is_clean: bool
    done_tokens: int = 0


class SpeedMeter:
    """One stretch for each place that has prompts to compute."""

    def __init__(self) -> None:
        self._stretches: dict[Key, _Stretch] = {}

    def sent(self, ticket: Ticket, load: PlaceLoad, now_s: float) -> None:
        """A request was sent (``load`` with it)."""
        stretch = self._stretches.get(ticket.key)
        if stretch is None or len(load.prefilling) == 1:
            self._stretches[ticket.key] = _Stretch(now_s, ticket.is_clean)
        elif not ticket.is_clean:
            stretch.is_clean = False

    def first_token(self, ticket: Ticket, load: PlaceLoad, now_s: float) -> float | None:
        """A prefill ended (``load`` without it); seconds per token when that completes a sample."""
        if ticket.tokens_ahead:
            tokens = ticket.tokens_ahead + ticket.uncached_tokens
            self._end_when_idle(ticket.key, load)
            return (now_s - ticket.started_s) / tokens if tokens >= SAMPLE_TOKENS_MIN else None
        stretch = self._stretches.get(ticket.key)
        if stretch is None:
            return None
        stretch.done_tokens += ticket.uncached_tokens
        elapsed_s = now_s - stretch.began_s
        found = None
        if stretch.done_tokens >= SAMPLE_TOKENS_MIN:
            if stretch.is_clean and 0 < elapsed_s <= STRETCH_S_MAX:
                found = elapsed_s / stretch.done_tokens
            stretch.began_s, stretch.done_tokens = now_s, 0
        self._end_when_idle(ticket.key, load)
        return found

    def over(self, ticket: Ticket, load: PlaceLoad) -> None:
        """A request ended (``load`` without it)."""
        stretch = self._stretches.get(ticket.key)
        if stretch is not None and not ticket.is_decoding:
            stretch.is_clean = False
        self._end_when_idle(ticket.key, load)

    def forget(self, key: Key) -> None:
        """A place is gone."""
        self._stretches.pop(key, None)

    def _end_when_idle(self, key: Key, load: PlaceLoad) -> None:
        if not load.prefilling:
            self._stretches.pop(key, None)
