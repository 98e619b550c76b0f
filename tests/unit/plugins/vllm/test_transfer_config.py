"""Our connector beside the user's own --kv-transfer-config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from infera_vllm.transfer_config import NOT_COMBINED, combine, inexact_connectors, own_config


def multi(*children: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **outer,
        "kv_connector_extra_config": {"a": 1, "connectors": list(children)},
    }


def used(given: Any) -> dict[str, Any]:
    config = combine(given).config
    assert config is not None
    return config


def children_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    children: list[dict[str, Any]] = config["kv_connector_extra_config"]["connectors"]
    return children


def test_alone() -> None:
    assert used(None) == own_config([])
    assert own_config([])["kv_load_failure_policy"] == "recompute"
    assert combine(None).notes == []


def test_a_transport_is_kept_and_comes_first() -> None:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu", "kv_port": 9}
    config = used(given)
    assert config["kv_connector"] == "MultiConnector"
    assert children_of(config) == [given, own_config(["NixlConnector"])]
    assert config["kv_load_failure_policy"] == "recompute"
    assert "NixlConnector and InferaConnector" in combine(given).notes[0]


def test_the_engine_id_goes_to_the_outer_configuration_only() -> None:
    """MultiConnector gives its children the outer id, and ends with a TypeError when they have one of their own."""
    config = used({"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "e"})
    assert config["engine_id"] == "e"
    assert all("engine_id" not in child for child in children_of(config))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_blocks_a_step_still_writes_to_are_held_back_from_loads_whatever_the_users_role(role: str) -> None:
    """vLLM defers freeing them only for a consumer, and looks at the outer role."""
    config = used({"kv_connector": "NixlConnector", "kv_role": role})
    assert config["kv_role"] == "kv_both"
    assert children_of(config)[0]["kv_role"] == role
    several = used(multi({"kv_connector": "X", "kv_role": role}, kv_role=role))
    assert several["kv_role"] == "kv_both"
    assert children_of(several)[0]["kv_role"] == role


def test_a_user_who_wants_failures_is_warned() -> None:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    assert used(given)["kv_load_failure_policy"] == "fail"
    assert "ends with an error" in combine(given).notes[-1]
    assert "ends with an error" in combine({"kv_connector": "InferaConnector", "kv_role": "kv_both"}).notes[-1]


def test_several_connectors_get_one_more() -> None:
    config = used(multi({"kv_connector": "X"}, {"kv_connector": "Y"}))
    assert config["kv_connector_extra_config"]["a"] == 1
    assert [child["kv_connector"] for child in children_of(config)] == ["X", "Y", "InferaConnector"]
    assert children_of(config)[2] == own_config(["X", "Y"])


def test_what_is_given_is_not_changed() -> None:
    ours = {"kv_connector": "InferaConnector"}
    given = multi({"kv_connector": "X"}, ours)
    combine(given)
    assert given == multi({"kv_connector": "X"}, {"kv_connector": "InferaConnector"})
    combine(ours)
    assert ours == {"kv_connector": "InferaConnector"}


def test_ours_is_not_put_in_twice_but_completed() -> None:
    alone = used({"kv_connector": "InferaConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"})
    assert alone == own_config([])
    config = used(multi({"kv_connector": "X"}, {"kv_connector": "InferaConnector", "kv_role": "kv_both"}))
    assert [child["kv_connector"] for child in children_of(config)] == ["X", "InferaConnector"]
    assert children_of(config)[1]["kv_connector_module_path"] == "infera_vllm.connector"
    assert children_of(config)[1]["kv_connector_extra_config"] == {"infera_beside": ["X"]}
    wrong = combine(
        {"kv_connector": "InferaConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}
    )
    assert wrong.config is not None
    assert wrong.config["kv_role"] == "kv_both"
    assert "overwritten" in wrong.notes[-1]


NO_LIST = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 3}}


@pytest.mark.parametrize("given", [{}, {"kv_role": "kv_both"}, multi({"kv_role": "kv_both"}), NO_LIST])
def test_what_is_not_understood_is_left_to_vllm(given: dict[str, Any]) -> None:
    combined = combine(given)
    assert combined.config is None
    assert "left to vLLM" in combined.reason


@pytest.mark.parametrize("name", NOT_COMBINED)
def test_vllm_45387_a_connector_whose_sends_would_never_be_reported_over_is_left_alone(name: str) -> None:
    for given in ({"kv_connector": name, "kv_role": "kv_producer"}, multi({"kv_connector": name})):
        combined = combine(given)
        assert combined.config is None
        assert name in combined.reason


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
