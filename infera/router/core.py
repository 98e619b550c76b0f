"""The router's core: no sockets, no clock, no randomness of its own. Time comes in with every call.

A pick looks at what each worker holds (given by the caller) and at the load this router put on it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infera.cachemap.interface import Match, Tier
from infera.discovery.record import WorkerRecord
from infera.router.cost import PRIOR, Candidate, CostPrior
from infera.router.decision import Decision
from infera.router.load import LoadTable, Ticket
from infera.router.policy import Policy


@dataclass(frozen=True, slots=True)
class Option:
    """A worker's rank that may serve the request, with the matches of all the request's prompts there."""

    record: WorkerRecord
    dp_rank: int = 0
    matches: tuple[Match, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    is_suspect: bool = False


class NoWorkerError(Exception):
    """There is nobody to pick."""


class RouterCore:
    """Picks workers and keeps account of what it sent them. Belongs to one thread."""

    def __init__(self, policy: Policy, rng: random.Random, prior: CostPrior = PRIOR) -> None:
        self.policy = policy
        self.loads = LoadTable()
        self._rng = rng
        self._prior = prior

    def pick(
        self, options: Sequence[Option], *, now: float, is_streaming: bool, is_forced: bool = False
    ) -> tuple[Decision, Ticket]:
        """Choose, and count the request as sent.

        Suspect workers are passed over while there are others. Raises NoWorkerError when ``options`` is empty.
        """
        usable = [option for option in options if not option.is_suspect] or list(options)
        if not usable:
            raise NoWorkerError
        candidates = tuple(self._candidate(option, now) for option in usable)
        choice = self.policy.choose(candidates, self._rng)
        reason = "asked for by the client" if is_forced else self.policy.name
        decision = Decision(self.policy.name, reason, candidates, choice.costs, choice.index, now)
        chosen = decision.chosen
        ticket = self.loads.start(
            chosen.worker,
            chosen.dp_rank,
            prompt_tokens=chosen.prompt_tokens,
            uncached_tokens=chosen.uncached_tokens,
            now_s=now,
            is_streaming=is_streaming,
        )
        return decision, ticket

    def first_token(self, ticket: Ticket, *, now: float) -> None:
        """The engine's first data came: its prefill is over."""
        self.loads.of(ticket.worker, ticket.dp_rank).drain(now, self._prior.prefill_tokens_per_s)
        ticket.remaining_tokens = 0.0
        ticket.is_decoding = True

    def done(self, ticket: Ticket, *, now: float) -> None:
        """The request ended well, or by the client's wish."""
        del now
        self.loads.finish(ticket)

    def failed(self, ticket: Ticket, *, now: float) -> None:
        """The worker did not serve the request."""
        del now
        self.loads.finish(ticket)

    def _candidate(self, option: Option, now: float) -> Candidate:
        record = option.record
        load = self.loads.of(record.incarnation, option.dp_rank)
        load.drain(now, self._prior.prefill_tokens_per_s)
        bare = Candidate(
            worker=record.incarnation,
            worker_id=record.worker_id,
            dp_rank=option.dp_rank,
            prompt_tokens=sum(option.prompt_lengths),
            queued_prefill_tokens=load.queued_prefill_tokens(),
            active_requests=load.active_requests,
            decode_context_tokens=load.decode_context_tokens(),
            kv_capacity_tokens=record.kv_capacity_tokens,
        )
        return replace(bare, cached_tokens_by_tier=usable_tokens(option))


def usable_tokens(option: Option) -> tuple[tuple[Tier, int], ...]:
    """Cached tokens by tier over all prompts. An engine always computes a prompt's last token itself, so of a
    prompt that is cached to its end the last block does not count."""
    block = option.record.block_size_tokens or 1
    totals: dict[Tier, int] = {}
    for match, length in zip(option.matches, option.prompt_lengths, strict=False):
        left = max(0, length - 1) // block * block
        for tier in sorted(match.tokens_by_tier):
            taken = min(left, match.tokens_by_tier[tier])
            left -= taken
            if taken:
                totals[tier] = totals.get(tier, 0) + taken
    return tuple(sorted(totals.items()))
