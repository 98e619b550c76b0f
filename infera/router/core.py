"""The router's core: no sockets, no clock, no randomness of its own. Time comes in with every call.

A pick looks at what each place holds (given by the caller), at the load this router and others it knows of put on
it, at the load its engine reports, and at how fast it was seen to be. Belongs to one thread.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from infera.cachemap.load_table import PlaceSum
from infera.discovery.record import RankLoad
from infera.router.affinity import Lease, SessionTable, scope_of
from infera.router.busy import BusyShares
from infera.router.cost import PRIOR, CostPrior
from infera.router.decision import Decision
from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.load import LoadTable, Ticket
from infera.router.measure import SpeedMeter
from infera.router.peers import Peers
from infera.router.place import Option, Place, usable_tokens
from infera.router.policy import Policy
from infera.router.reports import EngineReports, merged
from infera.router.scoring import Row
from infera.router.speed import SpeedBook

SATURATION_S_DEFAULT: Final = 10.0


class NoWorkerError(Exception):
    """There is nobody to pick."""


class SaturatedError(Exception):
    """Every place has as much to do as it may; the first of them should be free in ``free_in_s``."""

    def __init__(self, free_in_s: float) -> None:
        super().__init__(f"all workers are saturated; the first should be free in {free_in_s:.1f} s")
        self.free_in_s = free_in_s


@dataclass(slots=True)
class _Sent:
    """What the core keeps of a request under way."""

    place: Place
    lease: Lease | None


class RouterCore:
    """Picks places and keeps account of what it sent them."""

    def __init__(
        self,
        policy: Policy,
        rng: random.Random,
        *,
        prior: CostPrior = PRIOR,
        sessions: SessionTable | None = None,
        saturation_s: float = SATURATION_S_DEFAULT,
    ) -> None:
        """A place whose predicted queue is longer than ``saturation_s`` takes nothing more while others can, once the
        speed of its kind was measured."""
        self.policy = policy
        self.loads = LoadTable()
        self.speeds = SpeedBook(prior)
        self.reports = EngineReports()
        self.peers = Peers()
        self.sessions = sessions if sessions is not None else SessionTable()
        self.saturation_s = saturation_s
        self._meter = SpeedMeter()
        self._busy = BusyShares()
        self._rng = rng
        self._prior = prior
        self._sent: dict[int, _Sent] = {}

    def pick(self, options: Sequence[Option], demand: Demand, *, now: float) -> tuple[Decision, Ticket]:
        """Choose, and count the request as sent.

        Suspect workers are passed over while there are others, saturated ones likewise. Raises NoWorkerError when
        ``options`` is empty, SaturatedError when all are saturated and the request may wait, and
        TooManyRequestsError.
        """
        usable = [option for option in options if not option.is_suspect] or list(options)
        if not usable:
            raise NoWorkerError
        field = self._field(usable, demand, now)
        open_field = self._unsaturated(field, demand, now)
        scope, bound = self._bound(demand, field, now)
        if bound is not None:
            index, reason = bound, "session"
        elif demand.is_forced:
            index, reason = self.policy.choose(field, demand, self._rng), "asked for by the client"
        else:
            field = open_field
            index, reason = self.policy.choose(field, demand, self._rng), self.policy.name
        costs = field.costs(self.policy.weights(demand.role))
        passed_over = _passed_over(options, usable, field)
        decision = Decision(self.policy.name, reason, field, costs, index, now, passed_over)
        ticket = self._start(decision, demand, now)
        lease = self._lease(scope, demand, decision, is_hit=bound is not None)
        self._sent[ticket.ticket_id] = _Sent(decision.place, lease)
        return decision, ticket

    def first_token(self, ticket: Ticket, *, now: float) -> None:
        """The engine's first data came: its prefill is over."""
        if ticket.is_over:
            return
        place = self._sent[ticket.ticket_id].place
        load = self.loads.of(ticket.key)
        load.drain(now, self.speeds.s_per_token(place, now))
        if not self.loads.first_token(ticket):
            return
        self.peers.tell(ticket.key, load, now)
        sample = self._meter.first_token(ticket, load, now)
        if sample is not None:
            self.speeds.learn(place, sample, now)

    def done(self, ticket: Ticket, *, now: float) -> None:
        """The request ended well, or by the client's wish. Does nothing when it already ended."""
        lease = self._finish(ticket, now)
        if lease is not None:
            self.sessions.release(lease, now)

    def failed(self, ticket: Ticket, *, now: float) -> None:
        """The worker did not serve the request, or not to its end. Does nothing when it already ended."""
        lease = self._finish(ticket, now)
        if lease is not None:
            self.sessions.invalidate(lease)

    def report(self, places: Sequence[Place], loads: Sequence[RankLoad], *, now: float) -> None:
        """A worker's engine said what its ranks are doing. A worker with one place stands for all its ranks."""
        told = {load.dp_rank: load for load in loads}
        for place in places:
            load = told.get(place.dp_rank) if len(places) > 1 else merged(loads)
            if load is not None:
                (peers,) = self.peers.at([place.key], [0.0], now)
                known = self.loads.of(place.key).active_requests + round(peers.requests)
                sample = self.reports.put(place.key, load, known, now)
                if sample is not None:
                    self.speeds.learn(place, sample, now)

    def forget(self, places: Iterable[Place]) -> None:
        """These places are gone for good. Requests under way there are released by their own ends."""
        for place in places:
            self.speeds.forget(place.key)
            self.reports.forget(place.key)
            self._meter.forget(place.key)
            self._busy.forget(place.key)
            self.peers.forget(place.key)
            self.policy.forget(place.key)

    def _field(self, options: Sequence[Option], demand: Demand, now: float) -> Field:
        priors_s = [self.speeds.prior_s_per_token(option.place.kind) for option in options]
        factors = [self.speeds.factor(option.place.key, now) for option in options]
        speeds_s = [prior_s * factor for prior_s, factor in zip(priors_s, factors, strict=True)]
        peers = self.peers.at([option.place.key for option in options], speeds_s, now)
        numbers: list[float] = []
        for option, prior_s, factor, peer in zip(options, priors_s, factors, peers, strict=True):
            row = self._row(option, prior_s, factor, peer, now)
            numbers.extend(_decode_row(Row(*row)) if demand.role == "decode" else row)
        return Field(options, array("d", numbers))

    def _row(self, option: Option, prior_s: float, factor: float, peer: PlaceSum, now: float) -> tuple[float, ...]:
        """The columns of `Row`, in its order."""
        place, prior = option.place, self._prior
        key = place.key
        load, others = self.loads.of(key), self.reports.others(key, now, prior_s * factor)
        load.drain(now, prior_s * factor)
        capacity = place.record.kv_capacity_tokens or 0
        context_tokens = load.context_tokens + peer.context_tokens
        return (
            sum(option.prompt_lengths),
            *usable_tokens(option),
            load.queued_prefill_tokens,
            others.prefill_tokens + peer.queued_tokens,
            load.active_requests + others.waiting_requests + others.running_requests + peer.requests,
            context_tokens,
            max(self._busy.share(key, now), others.busy_share),
            context_tokens if others.kv_usage is None else others.kv_usage * capacity,
            capacity,
            prior_s,
            factor,
            prior.ram_s_per_token,
            prior.disk_s_per_token,
            prior.peer_s_per_token,
        )

    def _unsaturated(self, field: Field, demand: Demand, now: float) -> Field:
        """The places that may take more; all of them where the request must not wait."""
        costs = field.costs(self.policy.weights(demand.role))
        queue_s = costs.queue_s
        is_full, limit_s = self.reports.is_full, self.saturation_s
        free = [
            index
            for index, option in enumerate(field.options)
            if not is_full(option.place.key, now)
            # An assumed speed is good enough to compare workers, not to refuse work.
            and (queue_s[index] <= limit_s or not self.speeds.is_measured(option.place.kind))
        ]
        if len(free) == len(field) or (not free and (demand.is_forced or demand.is_retry)):
            return field
        if not free:
            raise SaturatedError(max(0.0, min(queue_s) - self.saturation_s))
        return field.only(free)

    def _bound(self, demand: Demand, field: Field, now: float) -> tuple[bytes | None, int | None]:
        """The session's scope where sessions are bound, and the candidate it is bound to, if that may be used."""
        if demand.session is None or demand.is_forced or not self.sessions.covers(demand.role):
            return None, None
        scope = scope_of(demand.model, demand.role, demand.session)
        target = self.sessions.target(scope, now)
        if target is None:
            return scope, None
        places = (index for index in range(len(field)) if field.place(index).key == target)
        return scope, next(places, None)

    def _start(self, decision: Decision, demand: Demand, now: float) -> Ticket:
        row = decision.row
        uncached = round(row.uncached_tokens)
        option = decision.field.options[decision.chosen_index]
        is_known = not option.is_guess and row.cached_tokens == row.hbm_tokens
        is_known = is_known and not self.reports.has_others_waiting(decision.place.key, now)
        is_measurable = demand.is_streaming and not demand.is_retry and is_known
        has_others_ahead = row.other_prefill_tokens > 0
        ticket = self.loads.start(
            decision.place.key,
            prompt_tokens=round(row.prompt_tokens),
            uncached_tokens=uncached,
            now_s=now,
            is_streaming=demand.is_streaming,
            is_clean=is_measurable and not has_others_ahead,
            tokens_ahead=row.queued_prefill_tokens + row.other_prefill_tokens
            if is_measurable and has_others_ahead
            else 0.0,
        )
        self._meter.sent(ticket, self.loads.of(ticket.key), now)
        self._busy.add(ticket.key, decision.costs[decision.chosen_index].prefill_s, now)
        self.reports.note_request(uncached)
        self.peers.tell(ticket.key, self.loads.of(ticket.key), now)
        return ticket

    def _lease(self, scope: bytes | None, demand: Demand, decision: Decision, *, is_hit: bool) -> Lease | None:
        if scope is None:
            return None
        if is_hit:
            return self.sessions.hit(scope, demand.role)
        return self.sessions.select(scope, demand.role, decision.place.key)

    def _finish(self, ticket: Ticket, now: float) -> Lease | None:
        load = self.loads.of(ticket.key)
        if not self.loads.finish(ticket):
            return None
        self.peers.tell(ticket.key, load, now)
        self._meter.over(ticket, load)
        return self._sent.pop(ticket.ticket_id).lease


def _passed_over(options: Sequence[Option], usable: Sequence[Option], field: Field) -> tuple[tuple[Place, str], ...]:
    if len(field) == len(options):
        return ()
    taken = {option.place.key for option in field.options}
    open_to_all = {option.place.key for option in usable}
    return tuple(
        (option.place, "saturated" if option.place.key in open_to_all else "suspect")
        for option in options
        if option.place.key not in taken
    )


def _decode_row(row: Row) -> Row:
    """A decode place computes no prompt: what it does not hold comes from the prefill place, as from any peer."""
    return row._replace(peer_tokens=row.peer_tokens + row.uncached_tokens)
