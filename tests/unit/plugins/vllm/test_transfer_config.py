"""Our connector beside the user's own --kv-transfer-config."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from infera_vllm.transfer_config import combine, inexact_connectors, own_config


def test_alone() -> None:
    combined = combine(None)
    assert combined.config is not None
    assert (combined.config["kv_connector"], combined.uses_kvd, combined.notes) == ("InferaConnector", True, [])
    assert combined.config["kv_load_failure_policy"] == "recompute"


def test_a_transport_is_kept_and_comes_first() -> None:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "e", "kv_buffer_device": "cpu"}
    combined = combine(json.dumps(given))
    config = combined.config
    assert config is not None
    assert (config["kv_connector"], config["engine_id"], config["kv_role"]) == ("MultiConnector", "e", "kv_producer")
    first, ours = config["kv_connector_extra_config"]["connectors"]
    assert first == given
    assert ours == own_config(["NixlConnector"])
    assert config["kv_load_failure_policy"] == "recompute"
    assert "NixlConnector and InferaConnector" in combined.notes[0]


def test_a_user_who_wants_failures_is_warned() -> None:
    combined = combine('{"kv_connector":"NixlConnector","kv_load_failure_policy":"fail"}')
    assert combined.config is not None
    assert combined.config["kv_load_failure_policy"] == "fail"
    assert "fails" in combined.notes[-1]
    assert "fails" in combine('{"kv_connector":"InferaConnector"}').notes[0]


def test_several_connectors_get_one_more() -> None:
    extra = {"a": 1, "connectors": [{"kv_connector": "X"}, {"kv_connector": "Y"}]}
    given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    config = combine(json.dumps(given)).config
    assert config is not None
    extra = config["kv_connector_extra_config"]
    assert extra["a"] == 1
    assert [child["kv_connector"] for child in extra["connectors"]] == ["X", "Y", "InferaConnector"]


@pytest.mark.parametrize(
    "given",
    [
        {"kv_connector": "InferaConnector"},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "InferaConnector"}]},
        },
    ],
)
def test_ours_is_not_put_in_twice(given: dict[str, Any]) -> None:
    combined = combine(json.dumps({**given, "kv_load_failure_policy": "recompute"}))
    assert (combined.config, combined.uses_kvd, combined.notes) == (None, True, [])


BROKEN = '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[1]}}'


@pytest.mark.parametrize("given", ["", "no json", "[]", "{}", "3", BROKEN])
def test_what_is_not_understood_is_left_to_vllm(given: str) -> None:
    combined = combine(given)
    assert (combined.config, combined.uses_kvd) == (None, False)
    assert "left to vLLM" in combined.notes[0]


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"infera_beside": []}, ""),
        ({"infera_beside": ["NixlConnector", "MooncakeConnector"]}, ""),
        ({"infera_beside": ["NixlConnector", "ExampleConnector"]}, "ExampleConnector"),
        ({}, "another connector"),
        (None, "another connector"),
    ],
)
def test_connectors_of_which_it_is_not_known_that_they_are_exact(extra: Any, found: str) -> None:
    assert inexact_connectors(SimpleNamespace(kv_connector_extra_config=extra)) == found
