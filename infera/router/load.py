"""What each worker is doing, as far as this router knows: its own requests that are under way.

Queued prefill work drains in time at the assumed rate, not with the picks that look at it. A stream's own
prefill never drains to nothing before its first token, because an engine slower than assumed is still busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UNDRAINED_SHARE: Final = 0.1
TICKETS_MAX: Final = 100_000


@dataclass(slots=True)
class Ticket:
    """One request at one worker, from pick to done or failed."""

    ticket_id: int
    worker: str
    dp_rank: int
    prompt_tokens: int
    uncached_tokens: int
    started_s: float
    is_streaming: bool
    remaining_tokens: float = 0.0
    is_decoding: bool = False


@dataclass(slots=True)
class WorkerLoad:
    """Requests under way at one worker's rank."""

    tickets: dict[int, Ticket] = field(default_factory=dict)
    drained_s: float = 0.0

    @property
    def active_requests(self) -> int:
        """All requests under way."""
        return len(self.tickets)

    def queued_prefill_tokens(self) -> float:
        """Prompt tokens that are still to be computed."""
        return sum(ticket.remaining_tokens for ticket in self.tickets.values() if not ticket.is_decoding)

    def decode_context_tokens(self) -> int:
        """Tokens of context behind the requests that are decoding."""
        return sum(ticket.prompt_tokens for ticket in self.tickets.values() if ticket.is_decoding)

    def drain(self, now_s: float, tokens_per_s: float) -> None:
        """Let time pass: the oldest prefill is worked off first."""
        budget = max(0.0, now_s - self.drained_s) * tokens_per_s
        self.drained_s = now_s
        for ticket in self.tickets.values():
            if budget <= 0:
                break
            if ticket.is_decoding:
                continue
            floor = UNDRAINED_SHARE * ticket.uncached_tokens if ticket.is_streaming else 0.0
            done = min(budget, max(0.0, ticket.remaining_tokens - floor))
            ticket.remaining_tokens -= done
            budget -= done
            if not ticket.is_streaming and ticket.remaining_tokens <= 0:
                ticket.is_decoding = True


class LoadTable:
    """Loads of all workers. Unknown workers have none."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, int], WorkerLoad] = {}
        self._tickets: dict[int, Ticket] = {}
        self._made = 0

    @property
    def ticket_count(self) -> int:
        """Requests under way at all workers."""
        return len(self._tickets)

    def of(self, worker: str, dp_rank: int) -> WorkerLoad:
        """The load of a worker's rank, to read."""
        return self._loads.get((worker, dp_rank)) or WorkerLoad()

    def start(
        self, worker: str, dp_rank: int, *, prompt_tokens: int, uncached_tokens: int, now_s: float, is_streaming: bool
    ) -> Ticket:
        """A request was sent. Raises OverflowError past TICKETS_MAX: the server's own limit lies far below."""
        if len(self._tickets) >= TICKETS_MAX:
            raise OverflowError(f"{TICKETS_MAX} requests are under way")
        self._made += 1
        ticket = Ticket(self._made, worker, dp_rank, prompt_tokens, uncached_tokens, now_s, is_streaming)
        ticket.remaining_tokens = float(uncached_tokens)
        load = self._loads.setdefault((worker, dp_rank), WorkerLoad(drained_s=now_s))
        if not load.tickets:
            load.drained_s = now_s
        load.tickets[ticket.ticket_id] = ticket
        self._tickets[ticket.ticket_id] = ticket
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """The request is over, whichever way. Does nothing the second time."""
        if self._tickets.pop(ticket.ticket_id, None) is None:
            return
        load = self._loads[ticket.worker, ticket.dp_rank]
        del load.tickets[ticket.ticket_id]
        if not load.tickets:
            del self._loads[ticket.worker, ticket.dp_rank]
