"""Requests follow the cache: events over real sockets, with loss, restarts and late joins."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.support.processes import Cluster, call, control, wait_until

pytestmark = pytest.mark.integration


def chat(number: int, **more: Any) -> dict[str, Any]:
    """A conversation of its own."""
    text = f"conversation {number}: " + "many words that are the same " * 30
    return {"model": "m", "messages": [{"role": "user", "content": text}]} | more


def ask(fleet: Cluster, body: dict[str, Any], worker: str | None = None) -> Any:
    """Send, perhaps to a given worker."""
    headers = {"x-infera-worker": worker} if worker else {}
    reply = call(f"{fleet.url}/v1/chat/completions", body, headers=headers)
    assert reply.status == 200, reply.body
    return reply


def blocks(fleet: Cluster, worker: str) -> int:
    """Blocks the router knows of a worker."""
    for entry in call(f"{fleet.url}/v1/workers").json["data"]:
        if entry["worker_id"] == worker:
            return int(entry["cached_blocks"].get("hbm", 0))
    return -1


def events(fleet: Cluster, outcome: str) -> float:
    """A counter of the cache map."""
    name = f'infera_cachemap_events_total{{outcome="{outcome}",source="engine"}} '
    for line in call(f"{fleet.url}/metrics").body.decode().splitlines():
        if line.startswith(name):
            return float(line.removeprefix(name))
    return 0.0


def start(fleet: Cluster, *names: str) -> None:
    """A server and named engines."""
    fleet.start_server()
    for name in names:
        fleet.start_engine("--worker-id", name)


def test_each_conversation_returns_to_the_worker_that_has_it(fleet: Cluster) -> None:
    start(fleet, "a", "b")
    homes = {number: ("a", "b")[number % 2] for number in range(6)}
    for number, home in homes.items():
        before = blocks(fleet, home)
        ask(fleet, chat(number), home)
        wait_until(lambda home=home, before=before: blocks(fleet, home) > before, "the events arrived")  # type: ignore[misc]
    for number, home in homes.items():
        reply = ask(fleet, chat(number))
        assert reply.headers["x-infera-worker"] == home
        usage = reply.json["usage"]
        story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json["attempts"][0]
        predicted = {entry["worker"]: sum(entry["cached_tokens"].values()) for entry in story["candidates"]}[home]
        assert predicted == usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_salted_prompt_does_not_match_another_tenants(fleet: Cluster) -> None:
    start(fleet, "a", "b")
    ask(fleet, chat(1, cache_salt="tenant"), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    assert _predicted(fleet, chat(1, cache_salt="tenant"))["a"] > 0
    assert _predicted(fleet, chat(1))["a"] == 0
    assert _predicted(fleet, chat(1, cache_salt="other"))["a"] == 0


def _predicted(fleet: Cluster, body: dict[str, Any]) -> dict[str, int]:
    reply = ask(fleet, body)
    story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json["attempts"][0]
    return {entry["worker"]: sum(entry["cached_tokens"].values()) for entry in story["candidates"]}


def test_lost_events_are_replayed(fleet: Cluster) -> None:
    start(fleet, "a")
    ask(fleet, chat(0), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the first events arrived")
    one = blocks(fleet, "a")
    control(fleet.processes[1], drop_events=1)
    ask(fleet, chat(1), "a")
    ask(fleet, chat(2), "a")
    wait_until(lambda: blocks(fleet, "a") >= 3 * one - 3, "what was lost came again")
    assert events(fleet, "replay") == 2
    assert events(fleet, "resync") == 0


def test_a_server_that_joins_late_learns_what_engines_hold(fleet: Cluster) -> None:
    start(fleet, "a")
    ask(fleet, chat(1), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    held = blocks(fleet, "a")
    server = fleet.server
    assert server is not None
    server.stop()
    port = server.url.rsplit(":", 1)[1]
    fleet.server = fleet._start(int(port), ["infera.server", "--port", port], None)
    wait_until(lambda: _quietly(lambda: blocks(fleet, "a") == held), "the new server knows the same blocks")


def _quietly(condition: Any) -> bool:
    try:
        return bool(condition())
    except OSError:
        return False


def test_evicted_blocks_are_forgotten(fleet: Cluster) -> None:
    fleet.start_server()
    fleet.start_engine("--worker-id", "a", "--capacity-blocks", "40")
    for number in range(6):
        ask(fleet, chat(number))
    wait_until(lambda: events(fleet, "removed") > 0, "removals arrived")
    wait_until(lambda: blocks(fleet, "a") == 40, "the map holds what the engine holds")


def test_llm_d_router_1736_a_worker_that_left_leaves_no_entries(fleet: Cluster) -> None:
    """llm-d-router#1736: a pod left, its entries stayed."""
    start(fleet, "a", "b")
    ask(fleet, chat(1), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    fleet.processes[1].stop(signal.SIGKILL)
    wait_until(lambda: blocks(fleet, "a") == -1, "the lease expired")
    metrics = call(f"{fleet.url}/metrics").body.decode()
    assert "infera_cachemap_entries 0.0" in metrics


def test_dynamo_11984_events_configured_and_none_published_is_noticed(fleet: Cluster) -> None:
    """dynamo#11984: events configured, none published, router none the wiser."""
    start(fleet, "a")
    control(fleet.processes[1], drop_events=1_000)
    for number in range(3):
        ask(fleet, chat(number))
    ready = call(f"{fleet.url}/ready").json
    assert any("no KV event came" in line for line in ready["degraded"]), ready


def test_sglang_39822_no_picks_for_caches_of_an_earlier_life(fleet: Cluster) -> None:
    """sglang#39822: picks for caches that no longer existed after restarts."""
    start(fleet, "a", "b")
    ask(fleet, chat(1), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    fleet.processes[1].stop(signal.SIGKILL)
    fleet.start_engine("--worker-id", "a")
    assert blocks(fleet, "a") == 0
    assert _predicted(fleet, chat(1)) == {"a": 0, "b": 0}
