"""Engines that fail in every way we can provoke: the client sees an answer, or the truth."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from typing import Any

import pytest

from tests.support.processes import Cluster, Process, call, control, engine_stats, wait_until

pytestmark = pytest.mark.integration
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
TEXT = "Paris is the capital"


def text_of(reply: Any, stream: bool) -> str:
    """The generated text of an answer."""
    if not stream:
        return str(reply.json["choices"][0]["message"]["content"])
    chunks = [event["choices"][0]["delta"]["content"] for event in reply.events if event != "[DONE]"]
    return "".join(chunks)


def two_engines(fleet: Cluster, *flags: str) -> tuple[Process, Process]:
    """A server with a worker `bad`, which is picked first, and a worker `good`."""
    fleet.start_server(*flags)
    bad = fleet.start_engine("--worker-id", "bad")
    warm = {**CHAT, "messages": [{"role": "user", "content": "warm up " * 50}]}
    assert call(f"{fleet.url}/v1/chat/completions", warm).status == 200
    good = fleet.start_engine("--worker-id", "good")
    return bad, good


def ask(fleet: Cluster, stream: bool = False, **more: Any) -> Any:
    """The prompt whose prefix only `bad` holds."""
    body = {"model": "m", "messages": [{"role": "user", "content": "warm up " * 50}], "stream": stream}
    return call(f"{fleet.url}/v1/chat/completions", body | more)


def seen_on(fleet: Cluster, worker: str) -> bool:
    """Whether the router knows blocks of a worker."""
    for entry in call(f"{fleet.url}/v1/workers").json["data"]:
        if entry["worker_id"] == worker:
            return bool(entry["cached_blocks"].get("hbm"))
    return False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["status_500", "close", "exit"])
def test_a_worker_that_fails_before_the_first_byte_is_replaced(fleet: Cluster, mode: str, stream: bool) -> None:
    bad, _ = two_engines(fleet)
    wait_until(lambda: seen_on(fleet, "bad"), "the cache of bad is known")
    control(bad, mode=mode, times=2)  # a reused connection that is closed is tried once more
    reply = ask(fleet, stream)
    assert reply.status == 200
    assert text_of(reply, stream) == TEXT
    assert reply.headers["x-infera-worker"] == "good"
    story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json
    assert [attempt["chosen"] for attempt in story["attempts"]] == ["bad", "good"]
    assert story["attempts"][0]["outcome"].startswith("failed")
    assert "infera_server_retries_total" in call(f"{fleet.url}/metrics").body.decode()


@pytest.mark.parametrize("mode", ["error_frame", "empty_stream"])
def test_a_stream_that_begins_with_an_error_or_nothing_is_a_failure(fleet: Cluster, mode: str) -> None:
    """A dead worker answered with an empty frame: HTTP 200, then nothing (failures.md, hangs)."""
    bad, _ = two_engines(fleet)
    wait_until(lambda: seen_on(fleet, "bad"), "the cache of bad is known")
    control(bad, mode=mode, times=1)
    reply = ask(fleet, stream=True)
    assert (reply.status, text_of(reply, True)) == (200, TEXT)
    assert reply.headers["x-infera-worker"] == "good"


def test_a_killed_worker_is_suspect_until_its_lease_ends(fleet: Cluster) -> None:
    bad, _ = two_engines(fleet)
    wait_until(lambda: seen_on(fleet, "bad"), "the cache of bad is known")
    bad.stop(signal.SIGKILL)
    assert ask(fleet).status == 200
    entries = {entry["worker_id"]: entry for entry in call(f"{fleet.url}/v1/workers").json["data"]}
    assert entries["bad"]["state"] == "suspect"
    for _ in range(3):
        story = call(f"{fleet.url}/v1/admin/why/{ask(fleet).headers['x-request-id']}").json
        assert [attempt["chosen"] for attempt in story["attempts"]] == ["good"]
    wait_until(lambda: len(call(f"{fleet.url}/v1/workers").json["data"]) == 1, "the lease expired")


def test_a_suspect_worker_is_trusted_again_after_its_next_heartbeat(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine()
    control(engine, mode="close", times=1)
    assert ask(fleet).status == 502
    assert ask(fleet).status == 200, "the only worker is used even while it is suspect"
    wait_until(lambda: call(f"{fleet.url}/v1/workers").json["data"][0]["state"] == "ready", "trusted again")


def test_when_everybody_fails_the_engines_own_words_are_told(fleet: Cluster) -> None:
    for engine in two_engines(fleet):
        control(engine, mode="status_500", times=9)
    reply = ask(fleet)
    assert reply.status == 500
    assert reply.json["error"]["message"] == "engine broke"
    for engine in fleet.processes[1:]:
        control(engine, mode="error_frame", times=9)
    reply = ask(fleet, stream=True)
    assert (reply.status, reply.json["error"]["message"]) == (500, "engine core died")


def test_tries_are_bounded(fleet: Cluster) -> None:
    fleet.start_server("--tries-max", "2")
    engines = [fleet.start_engine() for _ in range(3)]
    for engine in engines:
        control(engine, mode="status_500", times=9)
    assert ask(fleet).status == 500
    assert sum(len(engine_stats(engine)["seen"]) for engine in engines) == 2


@pytest.mark.parametrize("mode", ["die_mid_stream", "exit_mid_stream"])
def test_a_stream_that_breaks_ends_with_an_error_and_no_end_mark(fleet: Cluster, mode: str) -> None:
    fleet.start_server()
    control(fleet.start_engine(), mode=mode, times=1)
    reply = ask(fleet, stream=True)
    assert reply.status == 200
    assert reply.events[0]["choices"][0]["delta"]["content"] == "Paris"
    assert reply.events[-1]["error"]["code"] == "stream_broken"
    assert "[DONE]" not in reply.events


def test_silence_is_bounded_before_and_within_an_answer(fleet: Cluster) -> None:
    fleet.start_server("--first-byte-timeout", "300ms", "--idle-timeout", "300ms")
    engine = fleet.start_engine()
    control(engine, mode="hang", times=1)
    reply = ask(fleet)
    assert (reply.status, reply.json["error"]["code"]) == (504, "first_byte_timeout")
    control(engine, mode="hang_mid_stream", times=1)
    reply = ask(fleet, stream=True)
    assert reply.events[-1]["error"]["code"] == "stream_broken"
    wait_until(lambda: engine_stats(engine)["aborted"] == 2, "the engine was told to stop both")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["hang", "hang_mid_stream"])
def test_production_stack_634_a_client_that_leaves_stops_the_engine(fleet: Cluster, mode: str, stream: bool) -> None:
    """production-stack#634, dynamo#14507: a client's cancel was not passed on."""
    fleet.start_server()
    engine = fleet.start_engine()
    control(engine, mode=mode if stream else "hang", times=1)
    host, port = fleet.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": stream}))
    wait_until(lambda: len(engine_stats(engine)["seen"]) == 1, "the engine has the request")
    if stream and mode == "hang_mid_stream":
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: engine_stats(engine)["aborted"] == 1, "the engine noticed")
    wait_until(lambda: _active(fleet) == 0, "the load is released")
    assert ask(fleet).status == 200


def _active(fleet: Cluster) -> int:
    return sum(entry["load"]["active_requests"] for entry in call(f"{fleet.url}/v1/workers").json["data"])


def test_sigterm_lets_requests_finish_and_then_ends(fleet: Cluster) -> None:
    import threading

    server = fleet.start_server("--drain-timeout", "20s")
    engine = fleet.start_engine()
    control(engine, delay_s=0.3, times=0)
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.append(ask(fleet, stream=True)))
    asking.start()
    wait_until(lambda: len(engine_stats(engine)["seen"]) == 1, "the engine has the request")
    assert server.stop() == 0
    asking.join()
    assert text_of(replies[0], True) == TEXT


def test_draining_is_bounded(fleet: Cluster) -> None:
    server = fleet.start_server("--drain-timeout", "1s")
    engine = fleet.start_engine()
    control(engine, mode="hang", times=1)
    host, port = fleet.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
    wait_until(lambda: len(engine_stats(engine)["seen"]) == 1, "the engine has the request")
    server.stop(timeout_s=15)
    wait_until(lambda: engine_stats(engine)["aborted"] == 1, "the engine was told to stop")
    connection.close()
