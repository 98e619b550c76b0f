"""The agent as a real process beside a stand-in for an engine's HTTP surface, whose health the test decides.

The real engine with its agent runs in tests/e2e; here the engine must fall silent, and servers restart, on demand.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infera.discovery.record import ids_digest
from infera.engine.adapters import adapter_stamp, read_digest
from infera.engine.endpoint import EndpointError, EngineEndpoint, ServerEndpoint
from infera.hooks.bootstrap import AGENT_FACTS
from tests.support.processes import Cluster, call, wait_until

pytestmark = pytest.mark.integration

PAGES = {
    "/v1/models": {"data": [{"id": "m", "root": "/nowhere", "max_model_len": 512}, {"id": "a"}]},
    "/kv_event_sources": {
        "0": {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/x.pub", "replay_endpoint": None, "topic": "kv@x"}
    },
}
METRICS = """\
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
"""


class Surface(http.server.ThreadingHTTPServer):
    """Health, models, metrics and event sources of an engine."""

    is_healthy = True
    adapters: dict[str, str] = {}  # noqa: RUF012
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Surface

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = {"prompt": [1, 2], "messages": [3]} if self.path == "/tokenize" else {}
        tokens = next((tokens for name, tokens in answers.items() if name in question), None)
        body = json.dumps({"tokens": tokens}).encode()
        self.send_response(200 if tokens else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            status, body = (200 if self.server.is_healthy else 503), b""
        elif self.path == "/metrics":
            status, body = 200, METRICS.encode()
        else:
            page: Any = PAGES.get(self.path)
            if self.path == "/v1/models":
                loaded = [{"id": name, "root": path, "parent": "m"} for name, path in self.server.adapters.items()]
                page = {"data": [*PAGES["/v1/models"]["data"], *loaded]}
            status, body = (200, json.dumps(page).encode()) if page is not None else (404, b"{}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def surface() -> Iterator[Surface]:
    server = Surface(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """The process whose end is the engine's end."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(launcher: subprocess.Popen[bytes], surface: Surface, servers: list[str], **facts: Any) -> Any:
        told = {
            "launcher_pid": launcher.pid, "incarnation": uuid.uuid4().hex, "engine": "vllm", "engine_version": "0.32",
            "url": surface.url, "servers": servers, "event_topic": "kv@x", **facts,
        }  # fmt: skip
        environ = {**os.environ, AGENT_FACTS: json.dumps(told)}
        log = (tmp_path / "agent.log").open("a")
        agent = subprocess.Popen([sys.executable, "-m", "infera.engine.agent"], env=environ, stderr=log)
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.kill()
        agent.wait()


def test_engine_joins_and_leaves_with_its_process(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any
) -> None:
    fleet.start_server()
    agent = agents(launcher, surface, [fleet.url])
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined")
    (entry,) = call(f"{fleet.url}/v1/workers").json["data"]
    record = entry["record"]
    assert (record["model"], record["aliases"]) == ("m", ["a"])
    assert (record["block_size_tokens"], record["kv_capacity_tokens"], record["max_context_tokens"]) == (32, 3200, 512)
    assert record["events"]["ranks"] == [{"dp_rank": 0, "pub": "ipc:///tmp/x.pub", "replay": None}]
    assert record["hardware"]
    assert [(load["running_requests"], load["waiting_requests"]) for load in entry["reported"]] == [(2, 5)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert agent.wait(10) == 0, "the agent ends with its engine"
    assert fleet.known_urls() == [], "it deregistered, nobody had to wait for the lease"


def test_the_record_says_how_requests_become_tokens(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any
) -> None:
    fleet.start_server()
    agents(launcher, surface, [fleet.url], render={"tool_parser": "hermes", "template_arguments": {"a": [1]}})
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined")
    (entry,) = call(f"{fleet.url}/v1/workers").json["data"]
    render = entry["record"]["render"]
    assert (render["tool_parser"], render["template_arguments"]) == ("hermes", {"a": [1]})
    assert render["text_probe_digest"] == ids_digest([1, 2])
    assert render["chat_probe_digest"] == ids_digest([3])


def test_adapters_are_told_as_they_are_loaded_and_taken_away(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text("weights")
    surface.adapters = {"sql": str(folder)}
    fleet.start_server()
    agents(launcher, surface, [fleet.url])
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined")
    digest = read_digest(folder, adapter_stamp(folder)).hex()
    assert _adapters(fleet) == {"sql": digest}, "what an engine starts with is known from the first record on"
    surface.adapters = {"sql": str(folder), "hub": "somebody/adapter"}
    wait_until(lambda: _adapters(fleet) == {"sql": digest, "hub": ""}, "the second one is told")
    assert "'hub'" in (tmp_path / "agent.log").read_text()
    surface.adapters = {}
    wait_until(lambda: _adapters(fleet) == {}, "both are gone")


def _adapters(fleet: Cluster) -> dict[str, str]:
    (entry,) = call(f"{fleet.url}/v1/workers").json["data"]
    return dict(entry["record"]["adapters"])


def test_engine_that_falls_silent_leaves_until_it_is_back(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any
) -> None:
    fleet.start_server()
    agents(launcher, surface, [fleet.url])
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined")
    surface.is_healthy = False
    wait_until(lambda: surface.url not in fleet.known_urls(), "the sick engine left")
    surface.is_healthy = True
    wait_until(lambda: surface.url in fleet.known_urls(), "it came back")


def test_server_that_restarts_is_told_again(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any
) -> None:
    """A restart forgets all leases; the heartbeat is a registration, so nothing else is needed."""
    first = fleet.start_server()
    port = first.url.rpartition(":")[2]
    agents(launcher, surface, [first.url])
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined")
    first.stop()
    fleet.server = fleet._start(int(port), ["infera.server", "--port", port], None)
    wait_until(lambda: _knows(fleet, surface.url), "the new server knows the engine")


def test_every_server_is_told(fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any) -> None:
    """One of two servers is down: the other is served all the same."""
    fleet.start_server()
    agents(launcher, surface, ["http://127.0.0.1:1", fleet.url])
    wait_until(lambda: surface.url in fleet.known_urls(), "the engine joined the server that is up")


def test_another_engine_on_the_same_port_is_not_registered_as_ours(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any, tmp_path: Path
) -> None:
    """Two servers may listen on one port unseen (SO_REUSEPORT): the topic tells whose engine answers."""
    fleet.start_server()
    agents(launcher, surface, [fleet.url], event_topic="kv@mine")
    wait_until(lambda: "another engine answers" in (tmp_path / "agent.log").read_text(), "the mix-up is said")
    assert fleet.known_urls() == []


def test_wrong_join_token_is_refused_in_words(
    fleet: Cluster, surface: Surface, launcher: subprocess.Popen[bytes], agents: Any, tmp_path: Path
) -> None:
    fleet.start_server(environ={"INFERA_JOIN_TOKEN": "secret-4242"})
    agents(launcher, surface, [fleet.url], join_token="guess-7731")
    wait_until(lambda: "401" in (tmp_path / "agent.log").read_text(), "the refusal is logged")
    assert "secret-4242" not in (tmp_path / "agent.log").read_text()
    assert "guess-7731" not in (tmp_path / "agent.log").read_text()
    agents(launcher, surface, [fleet.url], join_token="secret-4242")
    wait_until(lambda: surface.url in fleet.known_urls(), "the right token joins")


def test_nobody_listens() -> None:
    assert not EngineEndpoint("http://127.0.0.1:1").is_healthy()
    with pytest.raises(EndpointError, match="does not answer"):
        EngineEndpoint("http://127.0.0.1:1").describe()
    ServerEndpoint("http://127.0.0.1:1", None).deregister("ab" * 16)


def _knows(fleet: Cluster, url: str) -> bool:
    try:
        return url in fleet.known_urls()
    except OSError:
        return False
