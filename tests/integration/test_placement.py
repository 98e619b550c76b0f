"""Placement through a real server: sessions, saturation, policies, explanations."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from typing import Any

import pytest

from tests.support.processes import Cluster, Reply, call, control, engine_stats, wait_until

pytestmark = pytest.mark.integration
FULL = [{"dp_rank": 0, "running_requests": 4, "waiting_requests": 9, "kv_usage": 0.99}]


def ask(fleet: Cluster, text: str, *, session: str | None = None, **more: Any) -> Reply:
    headers = {"x-session-id": session} if session is not None else {}
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return call(f"{fleet.url}/v1/chat/completions", body, headers=headers)


def metric(fleet: Cluster, name: str) -> float | None:
    """A sample's value; None when there is none."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", call(f"{fleet.url}/metrics").body.decode(), re.M)
    return float(found.group(1)) if found else None


def why(fleet: Cluster, reply: Reply) -> Any:
    return call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json


def two_engines(fleet: Cluster, *flags: str) -> None:
    fleet.start_server(*flags)
    for name in ("a", "b"):
        fleet.start_engine("--worker-id", name)


def test_a_session_stays_on_its_worker_and_the_header_goes_no_further(fleet: Cluster) -> None:
    two_engines(fleet, "--session-affinity", "both")
    homes = {name: ask(fleet, f"hello {name}", session=name).headers["x-infera-worker"] for name in "uvwxyz"}
    for turn in range(3):
        for name, home in homes.items():
            reply = ask(fleet, f"another {turn} thing {name}", session=name)
            assert reply.headers["x-infera-worker"] == home
            assert why(fleet, reply)["attempts"][0]["reason"] == "session"
    assert metric(fleet, 'infera_router_session_selected_total{role="mixed"}') == 6
    assert metric(fleet, 'infera_router_session_hits_total{role="mixed"}') == 18
    assert metric(fleet, 'infera_router_session_active_leases{role="mixed"}') == 0
    assert "another 2 thing" not in call(f"{fleet.url}/metrics").body.decode()
    seen = [entry for engine in fleet.processes[1:] for entry in engine_stats(engine)["seen"]]
    assert len(seen) == 24
    assert not any("x-session-id" in entry["headers"] for entry in seen)


def test_a_failed_request_binds_its_session_anew(fleet: Cluster) -> None:
    two_engines(fleet, "--session-affinity", "both")
    home = ask(fleet, "hello", session="s").headers["x-infera-worker"]
    control(fleet.processes[1 if home == "a" else 2], mode="status_500", times=1)
    reply = ask(fleet, "again", session="s")
    assert reply.status == 200
    other = reply.headers["x-infera-worker"]
    assert other != home
    assert metric(fleet, 'infera_router_session_invalidated_total{role="mixed"}') == 1
    assert ask(fleet, "and again", session="s").headers["x-infera-worker"] == other


def test_session_ids_that_are_refused(fleet: Cluster) -> None:
    fleet.start_server("--session-affinity", "prefill")
    engine = fleet.start_engine()
    for sent in (["s", "s"], [""], ["x" * 1025]):
        reply = _raw(fleet, sent)
        assert (reply.status, json.loads(reply.read())["error"]["code"]) == (400, "invalid_session_id")
    assert engine_stats(engine)["seen"] == []
    assert _raw(fleet, ["x" * 1024]).status == 200


def test_without_session_affinity_the_header_means_nothing(fleet: Cluster) -> None:
    fleet.start_server()
    fleet.start_engine()
    assert _raw(fleet, ["s", "s"]).status == 200
    assert "infera_router_session" not in call(f"{fleet.url}/metrics").body.decode()


def _raw(fleet: Cluster, sessions: list[str]) -> http.client.HTTPResponse:
    host, port = fleet.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    connection.putrequest("POST", "/v1/chat/completions")
    for session in sessions:
        connection.putheader("X-Session-ID", session)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body.encode())
    return connection.getresponse()


def test_when_all_are_saturated_requests_wait_and_are_served_when_one_is_free(fleet: Cluster) -> None:
    two_engines(fleet)
    for engine in fleet.processes[1:]:
        control(engine, load=FULL)
    _wait_for_report(fleet)
    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.append(ask(fleet, "hello", priority=-5)))
    asking.start()
    wait_until(lambda: metric(fleet, "infera_router_waiting_requests") == 1, "the request waits")
    control(fleet.processes[2])
    asking.join()
    assert replies[0].status == 200
    assert replies[0].headers["x-infera-worker"] == "b"
    assert why(fleet, replies[0])["waited_s"] > 0
    assert metric(fleet, "infera_router_waiting_requests") == 0


def test_a_wait_ends_with_429_and_the_time_to_come_back(fleet: Cluster) -> None:
    fleet.start_server("--queue-timeout", "200ms")
    control(fleet.start_engine("--worker-id", "a"), load=FULL)
    _wait_for_report(fleet)
    reply = ask(fleet, "hello")
    assert (reply.status, reply.json["error"]["code"]) == (429, "server_busy")
    assert int(reply.headers["retry-after"]) >= 1
    assert "--queue-timeout" in reply.json["error"]["message"]


def test_production_stack_634_a_waiting_client_that_leaves_holds_up_nobody(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine("--worker-id", "a")
    control(engine, load=FULL)
    _wait_for_report(fleet)
    host, port = fleet.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": []}))
    wait_until(lambda: metric(fleet, "infera_router_waiting_requests") == 1, "the request waits")
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: metric(fleet, "infera_router_waiting_requests") == 0, "the request left the line")
    control(engine)
    assert ask(fleet, "hello").status == 200


def _wait_for_report(fleet: Cluster) -> None:
    """Until the server was told that its workers are full: a request that would be served is still waiting."""

    def is_told() -> bool:
        reply = call(f"{fleet.url}/v1/workers").json
        return all(entry["reported"] and entry["reported"][0]["waiting_requests"] == 9 for entry in reply["data"])

    wait_until(is_told, "the reports arrived")


@pytest.mark.parametrize("policy", ["least-loaded", "random", "session", "text-prefix"])
def test_every_policy_serves(fleet: Cluster, policy: str) -> None:
    two_engines(fleet, "--router-policy", policy)
    text = "a long conversation about many things " * 40
    replies = [ask(fleet, text, session="s") for _ in range(4)]
    assert all(reply.status == 200 for reply in replies)
    homes = {reply.headers["x-infera-worker"] for reply in replies}
    if policy in ("session", "text-prefix"):
        assert len(homes) == 1
    story = why(fleet, replies[-1])
    assert story["attempts"][0]["policy"] == policy
    assert story["prompt"]["rendered"] is False
    if policy == "text-prefix":
        chosen = next(entry for entry in story["attempts"][0]["candidates"] if entry["worker"] in homes)
        assert chosen["is_guess"]
        assert chosen["cached_tokens"]["hbm"] > 0


def test_every_candidate_is_explained_with_its_numbers(fleet: Cluster) -> None:
    two_engines(fleet)
    reply = ask(fleet, "why here? " * 50, stream=True)
    story = why(fleet, reply)
    attempt = story["attempts"][0]
    assert {entry["worker"] for entry in attempt["candidates"]} == {"a", "b"}
    assert attempt["chosen"] == reply.headers["x-infera-worker"]
    assert attempt["outcome"] == "served"
    for entry in attempt["candidates"]:
        assert set(entry["predicted_s"]) == {"queue", "prefill", "load", "decode", "total"}
        assert entry["uncached_tokens"] == entry["prompt_tokens"] > 100
        assert entry["cost_s"] > 0
    assert metric(fleet, 'infera_router_real_first_token_seconds_count{model="m"}') == 1


def test_a_worker_without_events_is_placed_by_text_and_said_so(fleet: Cluster) -> None:
    two_engines(fleet, "--router-tokenizer-path", "/nonexistent")
    text = "a long conversation about many things " * 40
    homes = {ask(fleet, text).headers["x-infera-worker"] for _ in range(4)}
    assert len(homes) == 1
    assert any("placed by their text" in line for line in call(f"{fleet.url}/ready").json["degraded"])
    guessed = call(f"{fleet.url}/metrics").body.decode()
    assert re.search(r'infera_router_guessed_picks_total\{model="m",reason="\w+"\} 4', guessed)
