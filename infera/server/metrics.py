"""The server's metrics, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infera.cachemap.fleet_cache import FleetCache
from infera.discovery.record import ROLES
from infera.router.affinity import SessionTable
from infera.router.core import RouterCore
from infera.router.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)


class ServerMetrics:
    """Counters of one server. Labels only take values from small sets: models, workers, reasons."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "infera_server_requests", "Requests by outcome.", ["endpoint", "model", "status"], registry=r
        )
        self.duration = Histogram(
            "infera_server_request_seconds", "Whole life of a request.", ["endpoint"], buckets=_SECONDS, registry=r
        )
        self.first_token = Histogram(
            "infera_server_time_to_first_token_seconds",
            "From the request's arrival to its first data.",
            ["model"],
            buckets=_SECONDS,
            registry=r,
        )
        self.render = Histogram(
            "infera_server_render_seconds", "Template, tokens and keys.", buckets=_SHORT_SECONDS, registry=r
        )
        self.pick = Histogram(
            "infera_router_pick_seconds", "Matching and choosing.", buckets=_SHORT_SECONDS, registry=r
        )
        self.picks = Counter("infera_router_picks", "Picks by worker.", ["worker", "policy"], registry=r)
        self.guesses = Counter(
            "infera_router_guessed_picks",
            "Picks by the text of earlier prompts, because tokens or events were missing.",
            ["model", "reason"],
            registry=r,
        )
        self.predicted_first_token = Histogram(
            "infera_router_predicted_first_token_seconds",
            "Predicted time from pick to first data; compare with the real one.",
            ["model"],
            buckets=_SECONDS,
            registry=r,
        )
        self.real_first_token = Histogram(
            "infera_router_real_first_token_seconds",
            "Time from pick to first data.",
            ["model"],
            buckets=_SECONDS,
            registry=r,
        )
        self.waiting = Gauge("infera_router_waiting_requests", "Requests that wait for a worker.", registry=r)
        self.waited = Histogram(
            "infera_router_wait_seconds",
            "Time in the waiting line, of requests that had to wait, by how it ended.",
            ["outcome"],
            buckets=_SECONDS,
            registry=r,
        )
        self.failures = Counter(
            "infera_server_worker_failures", "Tries that failed, by worker and cause.", ["worker", "reason"], registry=r
        )
        self.retries = Counter("infera_server_retries", "Requests sent to another worker.", ["reason"], registry=r)
        self.unrenderable = Counter(
            "infera_prompt_unrenderable", "Prompts whose tokens are not known here.", ["model", "reason"], registry=r
        )
        self.prompt_tokens = Counter(
            "infera_prompt_tokens", "Prompt tokens as predicted and as engines report.", ["model", "source"], registry=r
        )
        self.cached_tokens = Counter(
            "infera_cached_tokens", "Cached prompt tokens, predicted and reported.", ["model", "source"], registry=r
        )
        self.mismatches = Counter(
            "infera_prompt_mismatches", "Answers whose prompt_tokens differ from ours.", ["model"], registry=r
        )
        self.refused = Counter("infera_server_refused", "Requests refused before any work.", ["reason"], registry=r)
        self.client_gone = Counter("infera_server_client_gone", "Clients that left early.", registry=r)

    def render_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class FleetCollector(Collector):
    """Reads fleet, load and cache map at the moment they are asked for."""

    def __init__(self, fleet: Fleet, core: RouterCore, cache: FleetCache) -> None:
        self._fleet = fleet
        self._core = core
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the fleet."""
        workers = GaugeMetricFamily("infera_fleet_workers", "Workers by state.", labels=["state"])
        states = [worker.state for worker in self._fleet.workers.values()]
        for state in ("ready", "suspect"):
            workers.add_metric([state], states.count(state))
        yield workers
        active = GaugeMetricFamily("infera_router_active_requests", "Requests under way.", labels=["worker"])
        for worker in self._fleet.workers.values():
            count = sum(self._core.loads.of(place.key).active_requests for place in worker.places)
            active.add_metric([worker.record.worker_id], count)
        yield active
        yield self._shared_requests()
        yield from session_metrics(self._core.sessions)
        yield GaugeMetricFamily(
            "infera_cachemap_entries", "Blocks known, over all workers and tiers.", value=self._cache.entry_count
        )
        events = CounterMetricFamily(
            "infera_cachemap_events", "Cache events by what became of them.", labels=["source", "outcome"]
        )
        for source in ("engine", "kvd"):
            for outcome, count in sorted(self._cache.counters(source).items()):
                events.add_metric([source, outcome], count)
        yield events

    def _shared_requests(self) -> Metric:
        keys = [place.key for worker in self._fleet.workers.values() for place in worker.places]
        peers = self._core.peers.at(keys, [0.0] * len(keys), time.monotonic())
        return GaugeMetricFamily(
            "infera_router_shared_requests",
            "Requests that other servers of this host have under way at our workers.",
            value=sum(peer.requests for peer in peers),
        )


def session_metrics(sessions: SessionTable) -> Iterator[Metric]:
    """What became of sessions, by role. Nothing when affinity is off."""
    if sessions.mode == "off":
        return
    roles = [role for role in ROLES if sessions.covers(role)]
    leases = GaugeMetricFamily(
        "infera_router_session_active_leases", "Requests under way that belong to a bound session.", labels=["role"]
    )
    for role in roles:
        leases.add_metric([role], sessions.active_leases[role])
    yield leases
    yield GaugeMetricFamily("infera_router_session_bindings", "Sessions bound to a worker.", value=len(sessions))
    for event, text in _SESSION_EVENTS.items():
        family = CounterMetricFamily(f"infera_router_session_{event}", text, labels=["role"])
        for role in roles:
            family.add_metric([role], sessions.counts[event, role])
        yield family
    yield CounterMetricFamily("infera_router_session_expired", "Bindings that were idle too long.", sessions.expired)


_SESSION_EVENTS: Final = {
    "hits": "Picks that went where the session is bound.",
    "selected": "Picks that bound a session: new, or its worker was gone.",
    "fallbacks": "Picks of new sessions without a binding, because there are as many as may be.",
    "invalidated": "Bindings ended by a failure.",
}
