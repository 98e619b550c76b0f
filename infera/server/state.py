"""Everything one server process holds, and how fleet changes reach it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.ingest_link import IngestLink
from infera.cachemap.load_table import BEAT_INTERVAL_S
from infera.discovery.embedded import EmbeddedRegistry
from infera.discovery.record import WorkerRecord
from infera.prompt.renderer import PromptRenderer
from infera.router.affinity import SessionTable
from infera.router.core import RouterCore
from infera.router.decision import DecisionRing
from infera.router.fleet import Fleet
from infera.router.policy import OverlapWeights, PolicySettings, make_policy
from infera.router.waiting import WaitingLine
from infera.server.metrics import FleetCollector, ServerMetrics
from infera.server.options import ServerConfig
from infera.server.waiting_room import WaitingRoom
from infera.transport.http_client import HttpClient, Timeouts

MODELS_REMEMBERED_MAX: Final = 1024
ADAPTERS_NAMED_MAX: Final = 5
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerState:
    """The parts of a server, wired together. Belongs to one event loop."""

    config: ServerConfig
    registry: EmbeddedRegistry
    cache: FleetCache
    fleet: Fleet
    renderer: PromptRenderer
    core: RouterCore
    client: HttpClient
    metrics: ServerMetrics
    decisions: DecisionRing
    waiting_room: WaitingRoom
    active_requests: int = 0
    is_draining: bool = False
    models_seen: OrderedDict[str, None] = field(default_factory=OrderedDict)
    models_mismatched: set[str] = field(default_factory=set)
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    async def start(self) -> None:
        """Begin to follow the fleet."""
        await self.cache.start()
        await self.registry.start(FleetWatcher(self))
        self.run_in_background(self._share_loads())

    async def stop(self) -> None:
        """Release everything."""
        await self.registry.stop()
        for task in self.background:
            task.cancel()
        await self.cache.close()
        self.client.close()
        self.renderer.close()

    async def _share_loads(self) -> None:
        """See what other servers of this host have under way, and let them see ours."""
        while True:
            self.core.peers.tend(self.cache.ingest.load_lane, self.core.loads.all(), time.monotonic())
            await asyncio.sleep(BEAT_INTERVAL_S)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it ends or the server stops."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def is_authorised(self, authorization: str | None) -> bool:
        """Whether a client's Authorization header holds one of the API keys, if there are any."""
        return not self.config.api_keys or any(bearer_matches(authorization, key) for key in self.config.api_keys)

    @property
    def reads_sessions(self) -> bool:
        """Whether X-Session-ID means anything here."""
        return self.core.sessions.mode != "off" or self.core.policy.name == "session"

    def missing(self) -> list[str]:
        """What keeps the server from serving at all."""
        found = []
        if self.is_draining:
            found.append("the server is shutting down")
        if not self.fleet.workers:
            found.append("no worker has registered: start one with INFERA_DISCOVERY set to this server's address")
        elif not any(worker.record.role == "mixed" for worker in self.fleet.workers.values()):
            found.append("no worker serves requests on its own (role mixed)")
        return found

    def degraded(self) -> list[str]:
        """What works worse than it could, each with its cure."""
        found = [*self.registry.problems(), *self.cache.problems()]
        if self.config.router_backend == "rust":
            found.append("--router-backend rust is not built yet: the Python router runs")
        if not self.config.is_loopback and not self.config.join_token:
            found.append("workers cannot register: off loopback a --join-token is required")
        if self.core.policy.reads_prefixes:
            for model, problem in self.renderer.problems().items():
                found.append(
                    f"prompts of model {model} are not understood ({problem.reason}) and placed by their text: "
                    f"{problem.detail}"
                )
            found.extend(
                f"worker {worker.record.worker_id} publishes no KV events: what it holds is guessed from the text of "
                "earlier prompts"
                for worker in self.fleet.workers.values()
                if worker.is_blind
            )
            found.extend(
                f"worker {worker.record.worker_id} serves LoRA adapters whose content is not known "
                f"({', '.join(unknown[:ADAPTERS_NAMED_MAX])}): what it holds of them is guessed from the "
                "text of earlier prompts; give the engine folders that its agent can read"
                for worker in self.fleet.workers.values()
                if (unknown := [name for name, digest in worker.record.adapters.items() if not digest])
            )
            found.extend(
                f"worker {worker.record.worker_id} computed {worker.computed_tokens} tokens and no KV event came: "
                "check that its event sockets can be reached from here"
                for worker in self.fleet.silent_workers()
            )
        found.extend(
            f"worker {worker.record.worker_id} is suspect: {worker.suspect_reason}"
            for worker in self.fleet.workers.values()
            if worker.is_suspect
        )
        return found


def make_state(config: ServerConfig) -> ServerState:
    """A new server's parts."""
    cache = FleetCache(IngestLink(name=config.shared_map))
    fleet = Fleet(cache)
    overlap = OverlapWeights(
        config.kv_overlap_weight, config.kv_prefill_overlap_weight, config.kv_decode_overlap_weight
    )
    core = RouterCore(
        make_policy(config.router_policy, PolicySettings(overlap)),
        random.Random(),
        sessions=SessionTable(config.session_affinity, config.session_affinity_ttl_s),
        saturation_s=config.saturation_queue_s,
    )
    metrics = ServerMetrics()
    metrics.registry.register(FleetCollector(fleet, core, cache))
    timeouts = Timeouts(config.connect_timeout_s, config.first_byte_timeout_s, config.idle_timeout_s)
    return ServerState(
        config=config,
        registry=EmbeddedRegistry(workers_max=config.workers_max, clock=time.monotonic),
        cache=cache,
        fleet=fleet,
        renderer=PromptRenderer(tokenizer_path=config.router_tokenizer_path),
        core=core,
        client=HttpClient(timeouts=timeouts),
        metrics=metrics,
        decisions=DecisionRing(),
        waiting_room=WaitingRoom(WaitingLine(config.queue_max), config.queue_timeout_s, metrics),
    )


class FleetWatcher:
    """Hands the registry's news on to fleet, cache map, tokenizers and connections."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def worker_joined(self, record: WorkerRecord) -> None:
        """A worker is there."""
        self._state.fleet.add(record)
        self._prepare(record)
        self._report(record)

    def worker_changed(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """A worker's record is another now."""
        self._state.core.forget(self._state.fleet.change(old, new))
        self._prepare(new)

    def worker_beat(self, record: WorkerRecord) -> None:
        """A worker is alive."""
        self._state.fleet.beat(record)
        self._report(record)

    def worker_left(self, record: WorkerRecord, reason: str) -> None:
        """A worker is gone."""
        del reason
        state = self._state
        state.core.forget(state.fleet.remove(record))
        state.client.forget(origin_of(record)[0])
        if not any(worker.record.model == record.model for worker in state.fleet.workers.values()):
            state.renderer.forget(record.model)

    def _report(self, record: WorkerRecord) -> None:
        places = self._state.fleet.workers[record.incarnation].places
        self._state.core.report(places, record.load, now=time.monotonic())
        self._state.waiting_room.pump()

    def _prepare(self, record: WorkerRecord) -> None:
        state = self._state
        for name in (record.model, *record.aliases, *record.adapters):
            state.models_seen[name] = None
            state.models_seen.move_to_end(name)
        while len(state.models_seen) > MODELS_REMEMBERED_MAX:
            state.models_seen.popitem(last=False)
        if state.core.policy.reads_prefixes:
            work = state.renderer.prepare(record.model, record.model_path, record.tokenizer_digest, record.render)
            state.run_in_background(work)


def origin_of(record: WorkerRecord) -> tuple[str, str]:
    """Where to connect to (http://host:port) and what to put before each path."""
    parts = urlsplit(record.url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")


def bearer_matches(authorization: str | None, secret: str) -> bool:
    """Compare a bearer token in constant time."""
    scheme, _, token = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), secret.encode())
