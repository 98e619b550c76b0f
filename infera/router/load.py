"""What each place is doing, as far as this router knows: its own requests that are under way.

Queued prefill work drains in time at the predicted speed, not with the picks that look at it, and first come first
computed: as long as the oldest stream has no first token, what came after it has hardly begun. So an engine that is
slower than predicted shows its whole queue, whatever is believed about its speed. An answer that is not streamed
shows no first token; its prefill ends when the prediction says so.

Guarantee: every count is the sum over the tickets that are under way, never negative, and zero when there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from infera.router.place import Key

UNDRAINED_SHARE: Final = 0.1
TICKETS_MAX: Final = 100_000


@dataclass(slots=True)
class Ticket:
    """One request at one place, from pick to done or failed."""

    ticket_id: int
    key: Key
    prompt_tokens: int
    uncached_tokens: int
    started_s: float
    is_streaming: bool
    is_clean: bool = True
    """Whether its time to the first token says something about the worker's speed."""
    tokens_ahead: float = 0.0
    """What is computed there before it, where other routers sent some of that: then its wait is a sample. Else 0."""
    remaining_tokens: float = 0.0
    is_decoding: bool = False
    is_over: bool = False

    @property
    def drainable_tokens(self) -> float:
        """What of the prompt may be taken for computed although no first token came."""
        floor = UNDRAINED_SHARE * self.uncached_tokens if self.is_streaming else 0.0
        return max(0.0, self.remaining_tokens - floor)


@dataclass(slots=True)
class PlaceLoad:
    """Requests under way at one place."""

    prefilling: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    decoding: dict[int, Ticket] = field(default_factory=dict)
    context_tokens: int = 0
    """Prompt tokens of all requests under way: what decodes now, or soon will, reads them at every step."""
    drained_s: float = 0.0
    _queued_tokens: float = 0.0

    @property
    def active_requests(self) -> int:
        """All requests under way."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def queued_prefill_tokens(self) -> float:
        """Prompt tokens that are still to be computed."""
        return self._queued_tokens

    @property
    def drainable_tokens(self) -> float:
        """How many of the queued tokens `drain` can take off before a first token has to come."""
        tokens = 0.0
        for ticket in self.prefilling.values():
            tokens += ticket.drainable_tokens
            if ticket.is_streaming:
                break
        return tokens

    def add(self, ticket: Ticket, now_s: float) -> None:
        """A request was sent here."""
        if not self.prefilling:
            self.drained_s = now_s
        ticket.remaining_tokens = float(ticket.uncached_tokens)
        self.prefilling[ticket.ticket_id] = ticket
        self._queued_tokens += ticket.remaining_tokens
        self.context_tokens += ticket.prompt_tokens

    def start_decode(self, ticket: Ticket) -> bool:
        """The request's prefill is over; False when it already was."""
        if not self._leave_prefill(ticket):
            return False
        ticket.is_decoding = True
        self.decoding[ticket.ticket_id] = ticket
        return True

    def remove(self, ticket: Ticket) -> None:
        """The request is over."""
        if not self._leave_prefill(ticket):
            del self.decoding[ticket.ticket_id]
        self.context_tokens -= ticket.prompt_tokens

    def drain(self, now_s: float, s_per_token: float) -> None:
        """Let time pass: the oldest prefill is worked off first."""
        if not self.prefilling:
            return
        budget = max(0.0, now_s - self.drained_s) / s_per_token if s_per_token > 0 else 0.0
        self.drained_s = max(self.drained_s, now_s)
        while budget > 0 and self.prefilling:
            ticket = next(iter(self.prefilling.values()))
            done = min(budget, ticket.drainable_tokens)
            ticket.remaining_tokens -= done
            self._queued_tokens -= done
            budget -= done
            if ticket.is_streaming or ticket.remaining_tokens > 0:
                return
            self.start_decode(ticket)

    def _leave_prefill(self, ticket: Ticket) -> bool:
        if self.prefilling.pop(ticket.ticket_id, None) is None:
            return False
        # Sums of fractions drift; with nobody left there is nothing to keep.
        self._queued_tokens = max(0.0, self._queued_tokens - ticket.remaining_tokens) if self.prefilling else 0.0
        ticket.remaining_tokens = 0.0
        return True


class TooManyRequestsError(Exception):
    """More requests are under way than are accounted for."""


class LoadTable:
    """Loads of all places. A place without requests takes no memory."""

    def __init__(self, tickets_max: int = TICKETS_MAX) -> None:
        self._loads: dict[Key, PlaceLoad] = {}
        self._tickets_max = tickets_max
        self._made = 0
        self.ticket_count = 0

    def of(self, key: Key) -> PlaceLoad:
        """The load of a place, to read."""
        return self._loads.get(key) or PlaceLoad()

    def all(self) -> Mapping[Key, PlaceLoad]:
        """The places with requests under way."""
        return self._loads

    def start(
        self,
        key: Key,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        now_s: float,
        is_streaming: bool,
        is_clean: bool = True,
        tokens_ahead: float = 0.0,
    ) -> Ticket:
        """A request was sent. Raises TooManyRequestsError past the limit; the server's own lies far below."""
        if self.ticket_count >= self._tickets_max:
            raise TooManyRequestsError(f"{self._tickets_max} requests are under way")
        self._made += 1
        ticket = Ticket(self._made, key, prompt_tokens, uncached_tokens, now_s, is_streaming, is_clean, tokens_ahead)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = PlaceLoad()
        load.add(ticket, now_s)
        self.ticket_count += 1
        return ticket

    def first_token(self, ticket: Ticket) -> bool:
        """The request's prefill is over; False when it already was, or the request is."""
        return not ticket.is_over and self._loads[ticket.key].start_decode(ticket)

    def finish(self, ticket: Ticket) -> bool:
        """The request is over, whichever way; False when it already was."""
        if ticket.is_over:
            return False
        ticket.is_over = True
        self.ticket_count -= 1
        load = self._loads[ticket.key]
        load.remove(ticket)
        if not load.active_requests:
            del self._loads[ticket.key]
        return True
