"""The agent: one process beside each engine launch, which keeps it in the fleet.

It waits until the engine answers, registers the full record with every server, heartbeats while the
engine is healthy, and deregisters when the engine is not, or is gone. It ends with its engine.
What it must know comes in the environment variable INFERA_AGENT_FACTS, from the hook.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infera.discovery.record import (
    EventRank,
    EventSource,
    KvdSource,
    RenderProfile,
    WorkerRecord,
    ids_digest,
    tokenizer_digest,
)
from infera.engine.adapter_watch import AdapterWatch
from infera.engine.endpoint import EndpointError, EngineEndpoint, ServerEndpoint
from infera.engine.hardware import hardware_name
from infera.hooks.bootstrap import AGENT_FACTS

READY_POLL_INTERVAL_S = 0.5
DEFAULT_LEASE_S = 6.0
HEARTBEATS_PER_LEASE = 3
REGISTER_RETRY_S = 1.0
TIMER_SLACK_S = 0.1
ADAPTERS_READ_S = 2.0
"""For the adapters an engine starts with. Blocks stored before the fleet is told what they hold are not followed."""

log = logging.getLogger("infera.agent")


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the hook knew at launch. Endpoints are ZMQ endpoints, `servers` URLs."""

    launcher_pid: int
    incarnation: str
    engine: str
    engine_version: str
    url: str
    servers: list[str]
    join_token: str | None = None
    role: str = "mixed"
    event_topic: str | None = None
    event_endpoint: str | None = None
    replay_endpoint: str | None = None
    kvd_socket: str | None = None
    engine_facts_path: str | None = None
    render: RenderProfile | None = None


@dataclass
class Lease:
    """What one server granted."""

    server: ServerEndpoint
    next_heartbeat_s: float = 0.0
    interval_s: float = DEFAULT_LEASE_S / HEARTBEATS_PER_LEASE
    is_registered: bool = False
    said: str = ""


class Agent:
    """The loop. `is_parent_gone(timeout_s)` waits, and says whether the engine's process has ended."""

    def __init__(self, facts: AgentFacts) -> None:
        self.facts = facts
        self.engine = EngineEndpoint(facts.url)
        self.leases = [Lease(ServerEndpoint(url, facts.join_token)) for url in facts.servers]
        self._parent = os.pidfd_open(facts.launcher_pid)
        self._record: WorkerRecord | None = None
        self._adapters = AdapterWatch()
        self._said_undescribed = ""

    def is_parent_gone(self, timeout_s: float) -> bool:
        """Sleep at most `timeout_s`; True as soon as the engine's launching process has ended."""
        poller = select.poll()
        poller.register(self._parent, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def run(self) -> None:
        """Register, heartbeat, deregister. Returns when the engine is gone."""
        try:
            while not self.is_parent_gone(self._poll_interval_s()):
                if self.engine.is_healthy():
                    self._tend()
                elif any(lease.is_registered for lease in self.leases):
                    log.warning("engine %s stopped answering; leaving the fleet until it does", self.facts.url)
                    self._leave()
        finally:
            self._leave()

    def _poll_interval_s(self) -> float:
        """Often while the engine starts or a server is missing, once a heartbeat afterwards."""
        if all(lease.is_registered for lease in self.leases):
            return min(lease.interval_s for lease in self.leases)
        return READY_POLL_INTERVAL_S

    def _tend(self) -> None:
        now_s = time.monotonic()
        due = [lease for lease in self.leases if lease.next_heartbeat_s <= now_s + TIMER_SLACK_S]
        if not due:
            return
        try:
            record = self._current_record()
        except EndpointError as error:
            if self._said_undescribed != str(error):
                log.warning("engine %s is not registered: %s", self.facts.url, error)
                self._said_undescribed = str(error)
            return
        for lease in due:
            self._heartbeat(lease, record, now_s)

    def _heartbeat(self, lease: Lease, record: WorkerRecord, now_s: float) -> None:
        try:
            lease_ttl_s = lease.server.register(record)
        except EndpointError as error:
            lease.is_registered = False
            lease.next_heartbeat_s = now_s + REGISTER_RETRY_S
            if lease.said != str(error):
                log.warning("cannot register with %s, retrying: %s", lease.server.url, error)
                lease.said = str(error)
            return
        if not lease.is_registered:
            log.info("registered %s with %s", record.worker_id, lease.server.url)
        lease.is_registered, lease.said = True, ""
        lease.interval_s = lease_ttl_s / HEARTBEATS_PER_LEASE
        lease.next_heartbeat_s = now_s + lease.interval_s

    def _leave(self) -> None:
        for lease in self.leases:
            if lease.is_registered:
                lease.server.deregister(self.facts.incarnation)
                lease.is_registered = False
                lease.next_heartbeat_s = 0.0

    def _current_record(self) -> WorkerRecord:
        """The full record: what does not change is asked once, adapters, kvd's instance and load each time."""
        if self._record is None:
            self._record = self._describe_engine()
        self._record = msgspec.structs.replace(self._record, adapters=self._describe_adapters())
        return msgspec.structs.replace(self._record, kvd=self._describe_kvd(), load=self.engine.load())

    def _describe_adapters(self) -> dict[str, str]:
        """LoRA adapters come and go while the engine runs. One that does not answer has those it had."""
        try:
            return self._adapters.digests(self.engine.adapters())
        except EndpointError:
            return self._record.adapters if self._record is not None else {}

    def _describe_engine(self) -> WorkerRecord:
        facts = self.facts
        described = self.engine.describe()
        self._describe_adapters()
        self._adapters.wait(ADAPTERS_READ_S)
        model_path = described.model_path if Path(described.model_path).is_dir() else ""
        return WorkerRecord(
            incarnation=facts.incarnation,
            worker_id=f"{facts.engine}-{facts.url.partition('://')[2]}",
            url=facts.url,
            engine=facts.engine,
            engine_version=facts.engine_version,
            role=msgspec.convert(facts.role, type=Any),
            model=described.model,
            aliases=tuple(described.aliases),
            model_path=described.model_path,
            tokenizer_digest=tokenizer_digest(model_path) if model_path else "",
            max_context_tokens=described.max_context_tokens,
            block_size_tokens=described.block_size_tokens,
            kv_capacity_tokens=described.kv_capacity_tokens,
            events=self._event_source(),
            hardware=hardware_name(),
            render=self._render_profile(described.model),
        )

    def _render_profile(self, model: str) -> RenderProfile | None:
        """What the command line says, and the engine's own ids of the probes."""
        if self.facts.render is None:
            return None
        text, chat = self.engine.probe_ids(model)
        return msgspec.structs.replace(
            self.facts.render,
            text_probe_digest=ids_digest(text) if text else "",
            chat_probe_digest=ids_digest(chat) if chat else "",
        )

    def _event_source(self) -> EventSource | None:
        facts = self.facts
        if facts.event_topic is None:
            return None
        ranks = self.engine.event_ranks(facts.event_topic)
        if not ranks and facts.event_endpoint:
            ranks = (EventRank(dp_rank=0, pub=facts.event_endpoint, replay=facts.replay_endpoint),)
        return EventSource(topic=facts.event_topic, ranks=ranks) if ranks else None

    def _describe_kvd(self) -> KvdSource | None:
        """Which daemon the engine's connector uses, as far as both are there; instance ids change."""
        facts = self.facts
        if facts.kvd_socket is None or facts.engine_facts_path is None:
            return None
        from kvd.client.connection import ClientConnection, UnavailableError
        from kvd.protocol import RefusedError

        try:
            namespace = json.loads(Path(facts.engine_facts_path).read_text())["namespace"]
            connection = ClientConnection.open(Path(facts.kvd_socket))
            try:
                seen = connection.observe()
            finally:
                connection.close()
        except (OSError, ValueError, KeyError, UnavailableError, RefusedError):
            return None
        return KvdSource(instance=seen["instance"], namespace=namespace, pub=seen["pub"], snapshot=seen["snapshot"])


def main() -> int:
    """Entry point of the agent process."""
    logging.basicConfig(
        level=os.environ.get("INFERA_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s infera-agent: %(message)s",
        stream=sys.stderr,
    )
    facts = msgspec.json.decode(os.environ.pop(AGENT_FACTS).encode(), type=AgentFacts)
    try:
        agent = Agent(facts)
    except ProcessLookupError:
        return 0  # the engine ended before its agent began
    agent.run()
    if facts.engine_facts_path:
        Path(facts.engine_facts_path).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
