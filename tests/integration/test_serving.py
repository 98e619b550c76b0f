"""Requests through the real server to real engine processes: what goes right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.processes import Cluster, call, control, engine_stats

pytestmark = pytest.mark.integration
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France? " * 20}]}


def post(fleet: Cluster, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """Send to the server under test."""
    return call(fleet.url + path, body, headers={key.replace("_", "-"): value for key, value in headers.items()})


def test_whole_answers_and_streams_arrive_as_the_engine_sent_them(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine("--alias", "other-name")
    direct = call(f"{engine.url}/v1/chat/completions", CHAT)
    reply = post(fleet, CHAT)
    assert (reply.status, reply.json["choices"]) == (200, direct.json["choices"])
    assert reply.headers["x-infera-worker"] == f"fake-{engine.url.removeprefix('http://')}"
    streamed = post(fleet, CHAT | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.body == call(f"{engine.url}/v1/chat/completions", CHAT | {"stream": True}).body
    assert post(fleet, CHAT | {"model": "other-name"}).status == 200
    models = call(f"{fleet.url}/v1/models").json["data"]
    assert [model["id"] for model in models] == ["m", "other-name"]
    assert call(f"{fleet.url}/v1/models/m").json["id"] == "m"
    assert call(f"{fleet.url}/v1/models/zzz").status == 404


def test_usage_is_stripped_unless_the_client_asked_for_it(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine()
    plain = post(fleet, CHAT | {"stream": True})
    assert not any("usage" in event for event in plain.events if event != "[DONE]")
    asked = post(fleet, CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert asked.events[-2]["usage"]["prompt_tokens"] > 100
    sent = [json.loads(entry["body"]) for entry in engine_stats(engine)["seen"]]
    assert all(body["stream_options"] == {"include_usage": True} for body in sent)
    metrics = call(f"{fleet.url}/metrics").body.decode()
    assert 'infera_prompt_tokens_total{model="m",source="reported"}' in metrics
    assert "infera_prompt_mismatches_total{" not in metrics


def test_the_body_goes_on_as_the_bytes_that_came(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine()
    raw = b'{ "model":"m",\n  "messages":[{"role":"user","content":"h\\u00e9"}], "unknown":{"a":[1.50,null]},"n":1 }'
    assert post(fleet, raw).status == 200
    assert engine_stats(engine)["seen"][-1]["body"] == raw.decode()


@pytest.mark.parametrize("prompt", ["hello", ["hello", "you"], [5, 6, 7], [[5, 6], [7, 8]]])
def test_completions_take_every_kind_of_prompt(fleet: Cluster, prompt: Any) -> None:
    fleet.start_server()
    fleet.start_engine()
    reply = post(fleet, {"model": "m", "prompt": prompt}, "/v1/completions")
    assert reply.status == 200
    story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json
    assert story["prompt"]["tokens"] == reply.json["usage"]["prompt_tokens"]


def test_a_client_may_insist_on_a_worker(fleet: Cluster) -> None:
    fleet.start_server()
    for name in ("left", "right"):
        fleet.start_engine("--worker-id", name)
    for name in ("left", "right", "left"):
        assert post(fleet, CHAT, X_Infera_Worker=name).headers["x-infera-worker"] == name
    refused = post(fleet, CHAT, X_Infera_Worker="middle")
    assert refused.status == 400
    assert "left, right" in refused.json["error"]["message"]


def test_every_answer_has_an_id_that_explains_it(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine("--worker-id", "one")
    reply = post(fleet, CHAT, X_Request_Id="my-own-id")
    assert reply.headers["x-request-id"] == "my-own-id"
    assert engine_stats(engine)["seen"][-1]["headers"]["x-request-id"] == "my-own-id"
    story = call(f"{fleet.url}/v1/admin/why/my-own-id").json
    assert story["attempts"][0]["chosen"] == "one"
    assert story["attempts"][0]["outcome"] == "served"
    assert "content" not in json.dumps(story), "prompts are not kept"
    assert call(f"{fleet.url}/v1/admin/why/unknown").status == 404
    odd = post(fleet, CHAT, X_Request_Id="with space")
    assert odd.headers["x-request-id"] != "with space"


def test_round_robin_needs_no_tokens(fleet: Cluster) -> None:
    fleet.start_server("--router-policy", "round-robin", "--router-backend", "rust")
    for name in ("a", "b"):
        fleet.start_engine("--worker-id", name)
    picked = [post(fleet, CHAT).headers["x-infera-worker"] for _ in range(4)]
    assert sorted(picked[:2]) == ["a", "b"]
    assert picked[:2] == picked[2:]
    ready = call(f"{fleet.url}/ready").json
    assert any("rust" in line for line in ready["degraded"])


def test_a_model_without_tokenizer_is_served_and_named(fleet: Cluster) -> None:
    fleet.start_server("--router-tokenizer-path", "/nonexistent")
    fleet.start_engine()
    assert post(fleet, CHAT).status == 200
    ready = call(f"{fleet.url}/ready").json
    assert ready["ready"]
    assert any("no_tokenizer" in line for line in ready["degraded"])
    metrics = call(f"{fleet.url}/metrics").body.decode()
    assert 'infera_prompt_unrenderable_total{model="m",reason="no_tokenizer"} 1.0' in metrics


def test_workers_are_shown_with_load_and_cache(fleet: Cluster) -> None:
    fleet.start_server()
    engine = fleet.start_engine("--worker-id", "one")
    control(engine, delay_s=0.0)
    post(fleet, CHAT)
    entry = call(f"{fleet.url}/v1/workers").json["data"][0]
    assert entry["worker_id"] == "one"
    assert entry["state"] == "ready"
    assert entry["load"]["active_requests"] == 0
    assert entry["record"]["url"] == engine.url
