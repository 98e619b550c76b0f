"""Bad requests get an error in OpenAI's shape, the right status and a reason that helps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes import Cluster, call, control

pytestmark = pytest.mark.integration
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def expect(reply: Any, status: int, *words: str) -> Any:
    """Check an error; its object."""
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]
    return error


def test_what_a_client_can_get_wrong(fleet: Cluster) -> None:
    fleet.start_server("--body-size-max", "10K")
    fleet.start_engine("--max-context", "64")
    chat = f"{fleet.url}/v1/chat/completions"
    expect(call(chat, b"{"), 400, "not JSON")
    expect(call(chat, b"[1]"), 400, "object")
    assert expect(call(chat, {**CHAT, "model": "zzz"}), 404, "zzz", "served here: m")["code"] == "model_not_found"
    expect(call(chat, {"messages": []}), 404, "no model")
    long = {"model": "m", "messages": [{"role": "user", "content": "long words " * 100}]}
    assert expect(call(chat, long), 400, "64 tokens")["code"] == "context_length_exceeded"
    expect(call(chat, {**CHAT, "x": "y" * 20_000}), 413, "10240")
    expect(call(chat), 405)
    expect(call(f"{fleet.url}/v1/nothing"), 404)


def test_no_worker_at_all(fleet: Cluster) -> None:
    fleet.start_server()
    reply = call(f"{fleet.url}/v1/chat/completions", CHAT)
    expect(reply, 503)
    assert int(reply.headers["retry-after"]) > 0
    assert call(f"{fleet.url}/health").status == 200
    ready = call(f"{fleet.url}/ready")
    assert ready.status == 503
    assert "INFERA_DISCOVERY" in ready.json["missing"][0]


def test_api_keys(fleet: Cluster) -> None:
    fleet.start_server(environ={"INFERA_API_KEY": "test-key,second"})
    fleet.start_engine()
    chat = f"{fleet.url}/v1/chat/completions"
    expect(call(chat, CHAT), 401)
    expect(call(chat, CHAT, headers={"authorization": "Bearer wrong"}), 401)
    expect(call(f"{fleet.url}/v1/models"), 401)
    for key in ("test-key", "second"):
        assert call(chat, CHAT, headers={"authorization": f"Bearer {key}"}).status == 200
    assert call(f"{fleet.url}/ready").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_refusal_is_passed_on_whole_and_not_retried(fleet: Cluster, stream: bool) -> None:
    fleet.start_server()
    engines = [fleet.start_engine() for _ in range(2)]
    for engine in engines:
        control(engine, mode="status_400", times=9)
    reply = call(f"{fleet.url}/v1/chat/completions", {**CHAT, "stream": stream})
    assert reply.status == 400
    assert reply.json == {"error": {"message": "bad temperature", "type": "BadRequestError", "code": 400}}
    seen = [len(call(f"{engine.url}/control").json["seen"]) for engine in engines]
    assert sum(seen) == 1


def test_an_engines_400_on_a_stream_is_not_sent_as_200(fleet: Cluster) -> None:
    """A species of failures.md: an engine's 400 on a stream sent as 200."""
    fleet.start_server()
    control(fleet.start_engine(), mode="error_frame_400", times=9)
    reply = call(f"{fleet.url}/v1/chat/completions", {**CHAT, "stream": True})
    assert reply.status == 400
    assert reply.json["error"]["message"] == "bad grammar"


def test_more_requests_than_allowed_are_told_to_wait(fleet: Cluster) -> None:
    import threading

    fleet.start_server("--concurrency-max", "1")
    control(fleet.start_engine(), delay_s=0.5, mode="normal")
    chat = f"{fleet.url}/v1/chat/completions"
    background = threading.Thread(target=call, args=(chat, {**CHAT, "stream": True}))
    background.start()
    statuses = []
    while background.is_alive() and 429 not in statuses:
        statuses.append(call(chat, b"{").status)
    background.join()
    assert 429 in statuses
