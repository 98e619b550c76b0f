"""LoRA adapters through the whole path: record, event stream, map and pick, over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infera.engine.adapters import adapter_stamp, read_digest
from tests.support.processes import Cluster, call, control, wait_until

pytestmark = pytest.mark.integration


def adapter(folder: Path, weights: str) -> Path:
    """An adapter's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


def digest(folder: Path) -> str:
    return read_digest(folder, adapter_stamp(folder)).hex()


def chat(model: str, number: int = 1) -> dict[str, Any]:
    text = f"conversation {number}: " + "many words that are the same " * 30
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def ask(fleet: Cluster, body: dict[str, Any], worker: str | None = None) -> Any:
    reply = call(f"{fleet.url}/v1/chat/completions", body, headers={"x-infera-worker": worker} if worker else {})
    assert reply.status == 200, reply.body
    return reply


def told(fleet: Cluster, worker: str) -> dict[str, Any]:
    """What the server lists of a worker."""
    entries = call(f"{fleet.url}/v1/workers").json["data"]
    return next(entry for entry in entries if entry["worker_id"] == worker)


def adapters(fleet: Cluster, worker: str) -> dict[str, str]:
    return dict(told(fleet, worker)["record"]["adapters"])


def blocks(fleet: Cluster, worker: str) -> int:
    return int(told(fleet, worker)["cached_blocks"].get("hbm", 0))


def predicted(fleet: Cluster, body: dict[str, Any]) -> dict[str, int]:
    """Tokens the pick expected to be cached, by worker; they are what the engine then reported."""
    reply = ask(fleet, body)
    story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json["attempts"][0]
    found = {entry["worker"]: sum(entry["cached_tokens"].values()) for entry in story["candidates"]}
    reported = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found[reply.headers["x-infera-worker"]] == reported
    return found


def test_an_adapters_blocks_reach_the_map_and_its_requests_are_matched(fleet: Cluster, tmp_path: Path) -> None:
    """sglang#27386: hits of a whole kind of requests were zero, and nobody noticed for weeks."""
    folder = adapter(tmp_path / "sql", "one")
    fleet.start_server()
    fleet.start_engine("--worker-id", "plain")
    fleet.start_engine("--worker-id", "a", "--adapter", f"sql={folder}")
    fleet.start_engine("--worker-id", "b", "--adapter", f"sql={folder}")
    wait_until(lambda: adapters(fleet, "a") == adapters(fleet, "b") == {"sql": digest(folder)}, "the content is told")
    models = {entry["id"]: entry for entry in call(f"{fleet.url}/v1/models").json["data"]}
    assert (sorted(models), models["sql"]["parent"]) == (["m", "sql"], "m")
    assert "parent" not in models["m"]
    ask(fleet, chat("sql"), "a")
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    found = predicted(fleet, chat("sql"))
    assert found["a"] > 0
    assert found["b"] == 0
    assert "plain" not in found, "it does not have the adapter"
    refused = call(f"{fleet.url}/v1/chat/completions", chat("sql"), headers={"x-infera-worker": "plain"})
    assert refused.status == 400


def test_a_loras_blocks_do_not_match_the_base_model(fleet: Cluster, tmp_path: Path) -> None:
    """A species of failures.md: a LoRA's blocks matched the base model."""
    folders = [adapter(tmp_path / name, name) for name in ("sql", "law")]
    fleet.start_server()
    flags = [flag for folder in folders for flag in ("--adapter", f"{folder.name}={folder}")]
    fleet.start_engine("--worker-id", "a", *flags)
    wait_until(lambda: all(adapters(fleet, "a").values()), "the contents are told")
    for model in ("sql", "m", "law"):
        before = blocks(fleet, "a")
        assert predicted(fleet, chat(model)) == {"a": 0}
        wait_until(lambda before=before: blocks(fleet, "a") > before, "the events arrived")  # type: ignore[misc]
    for model in ("sql", "m", "law"):
        assert predicted(fleet, chat(model))["a"] > 0


def test_an_adapter_loaded_at_run_time_is_followed_and_the_rest_stays_known(fleet: Cluster, tmp_path: Path) -> None:
    """Also under an old name: the same name with other content matches nothing of before."""
    first, second = adapter(tmp_path / "one", "one"), adapter(tmp_path / "two", "two")
    fleet.start_server()
    engine = fleet.start_engine("--worker-id", "a")
    ask(fleet, chat("m"))
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    held = blocks(fleet, "a")
    assert call(f"{fleet.url}/v1/chat/completions", chat("sql")).status == 404
    control(engine, adapters={"sql": str(first)})
    wait_until(lambda: adapters(fleet, "a") == {"sql": digest(first)}, "the loaded adapter is told")
    assert blocks(fleet, "a") == held
    ask(fleet, chat("sql"))
    wait_until(lambda: blocks(fleet, "a") == 2 * held, "the adapter's events arrived")
    assert predicted(fleet, chat("sql"))["a"] > 0
    control(engine, adapters={"sql": str(second)})
    wait_until(lambda: adapters(fleet, "a") == {"sql": digest(second)}, "the other content is told")
    assert predicted(fleet, chat("sql")) == {"a": 0}
    assert predicted(fleet, chat("m"))["a"] > 0
    control(engine, adapters={})
    wait_until(lambda: not adapters(fleet, "a"), "the adapter is gone")
    assert call(f"{fleet.url}/v1/chat/completions", chat("sql")).status == 503


def test_an_adapter_whose_content_is_not_known_is_served_and_said(fleet: Cluster, tmp_path: Path) -> None:
    fleet.start_server()
    fleet.start_engine("--worker-id", "a", "--adapter", f"sql={tmp_path / 'none'}")
    for _ in range(2):
        reply = ask(fleet, chat("sql"))
    story = call(f"{fleet.url}/v1/admin/why/{reply.headers['x-request-id']}").json
    assert story["prompt"]["adapter"] == "unknown"
    assert any("content is not known (sql)" in line for line in call(f"{fleet.url}/ready").json["degraded"])
    metrics = call(f"{fleet.url}/metrics").body.decode()
    assert 'infera_cachemap_events_total{outcome="lora",source="engine"}' in metrics
    assert 'infera_router_guessed_picks_total{model="m",reason="adapter_unknown"} 1.0' in metrics
