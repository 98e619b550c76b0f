"""Agents and the embedded registry over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infera.discovery.record import encode_record
from tests.support.processes import Cluster, call
from tests.support.records import record

pytestmark = pytest.mark.integration


def put(fleet: Cluster, made: Any, **headers: str) -> Any:
    """Register or renew."""
    url = f"{fleet.url}/internal/v1/workers/{made.incarnation}"
    return call(url, encode_record(made), method="PUT", headers=headers)


def test_the_contract_of_registration(fleet: Cluster) -> None:
    fleet.start_server("--workers-max", "3")
    first = put(fleet, record(1))
    assert first.status == 200
    assert first.json == {"lease_ttl_s": 6.0, "server_instance": first.json["server_instance"], "known": False}
    assert put(fleet, record(1)).json["known"] is True
    assert put(fleet, record(2, tokenizer_digest="aa")).status == 200
    conflict = put(fleet, record(3, tokenizer_digest="bb"))
    assert conflict.status == 409
    assert "worker-2" in conflict.json["error"]["message"]
    url = f"{fleet.url}/internal/v1/workers/{record(1).incarnation}"
    assert call(url, b"{}", method="PUT").status == 400
    assert call(url, encode_record(record(2)), method="PUT").status == 400
    assert call(url, b"x" * 100_000, method="PUT").status == 413
    for _ in range(2):
        assert call(url, method="DELETE").status == 200
    assert [entry["worker_id"] for entry in call(f"{fleet.url}/v1/workers").json["data"]] == ["worker-2"]
    assert put(fleet, record(4)).status == 200
    assert put(fleet, record(5)).status == 200
    assert put(fleet, record(6)).status == 503


def test_a_join_token_keeps_strangers_out(fleet: Cluster) -> None:
    fleet.start_server(environ={"INFERA_JOIN_TOKEN": "secret"})
    assert put(fleet, record(1)).status == 401
    assert put(fleet, record(1), authorization="Bearer wrong").status == 401
    assert put(fleet, record(1), authorization="Bearer secret").status == 200
    url = f"{fleet.url}/internal/v1/workers/{record(1).incarnation}"
    assert call(url, method="DELETE").status == 401
    assert len(call(f"{fleet.url}/v1/workers").json["data"]) == 1


def test_a_worker_without_events_is_named(fleet: Cluster) -> None:
    fleet.start_server()
    put(fleet, record(1, events=None))
    ready = call(f"{fleet.url}/ready").json
    assert any("publishes no KV events" in line for line in ready["degraded"]), json.dumps(ready)
