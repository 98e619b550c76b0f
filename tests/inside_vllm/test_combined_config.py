"""Configurations as Infera writes them, taken in by vLLM's own classes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from infera_vllm.arguments import ServeArguments
from infera_vllm.connector import InferaConnector
from infera_vllm.offloading import offloading_config
from infera_vllm.transfer_config import EXACT_CONNECTORS, NOT_COMBINED, combine, inexact_connectors
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

FLAG = "--kv-transfer-config"


def child(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


GIVEN = [
    child("ExampleConnector", shared_storage_path="/x"),
    child("ExampleConnector", "kv_producer") | {"engine_id": "mine"},
    child("OffloadingConnector", cpu_bytes_to_use=1 << 30),
    child("MultiConnector", connectors=[child("ExampleConnector"), child("DecodeBenchConnector")]),
]


def children(config: dict[str, Any]) -> list[tuple[type, Any]]:
    outer = KVTransferConfig(**json.loads(json.dumps(config)))
    assert KVConnectorFactory.get_connector_class(outer) is MultiConnector
    made = MultiConnector._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=outer))
    return [(kind, config.kv_transfer_config) for kind, config in made]


@pytest.mark.parametrize("given", GIVEN)
def test_vllm_makes_all_children_and_ours_is_last(given: dict[str, Any]) -> None:
    combined = combine(given)
    assert combined.config is not None
    made = children(combined.config)
    assert made[-1][0] is InferaConnector
    names = [config.kv_connector for _, config in made[:-1]]
    assert made[-1][1].kv_connector_extra_config["infera_beside"] == names
    if given["kv_connector"] != "MultiConnector":
        mine = made[0][1]
        assert (mine.kv_connector, mine.kv_role) == (given["kv_connector"], given["kv_role"])
        assert mine.kv_connector_extra_config == given["kv_connector_extra_config"]


def test_the_users_engine_id_reaches_his_connector() -> None:
    combined = combine(GIVEN[1])
    assert combined.config is not None
    assert [config.engine_id for _, config in children(combined.config)] == ["mine", "mine"]


@pytest.mark.parametrize("given", GIVEN)
def test_the_core_treats_the_engine_as_a_consumer_and_recomputes(given: dict[str, Any]) -> None:
    combined = combine(given)
    assert combined.config is not None
    outer = KVTransferConfig(**combined.config)
    assert outer.is_kv_consumer
    assert outer.is_kv_producer
    assert outer.kv_load_failure_policy == "recompute"


def test_alone_and_by_name() -> None:
    alone = combine(None).config
    assert alone is not None
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**alone)) is InferaConnector
    by_hand = KVTransferConfig(kv_connector="InferaConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(by_hand) is InferaConnector
    assert inexact_connectors(by_hand) == "another connector"


def test_the_names_in_our_lists_are_vllms() -> None:
    """vllm_26452: a name that another version has changed is noticed here."""
    unknown = (EXACT_CONNECTORS | set(NOT_COMBINED)) - set(KVConnectorFactory._registry)
    assert not unknown


@pytest.mark.parametrize(
    "words",
    [
        [f"{FLAG}.kv_connector", "X", f"{FLAG}.kv_role", "kv_both", f"{FLAG}.kv_connector_extra_config.bytes", "80m"],
        [FLAG, '{"kv_connector": "X", "kv_role": "kv_both", "kv_connector_extra_config": {"bytes": 2G, "name": "2G"}}'],
        [FLAG, '{"kv_connector": "Y", "kv_role": "kv_both"}', f"{FLAG}.kv_connector=X", f"{FLAG}.kv_role=kv_producer"],
        [f"{FLAG}.kv_connector=X", f"{FLAG}.kv_role=kv_both", f"{FLAG}.kv_connector_extra_config.l+", "a,b"],
    ],
)
def test_flags_are_read_as_vllm_reads_them(words: list[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(words).kv_transfer_config
    found = ServeArguments(["vllm", "serve", *words], 2).find_json(FLAG)
    assert found is not None
    assert parsed.kv_connector == found["kv_connector"] == "X"
    assert parsed.kv_role == found["kv_role"]
    assert parsed.kv_connector_extra_config == found.get("kv_connector_extra_config", {})


@pytest.mark.parametrize("simple", ["0", "1"])
def test_offloading_is_said_as_vllm_says_it(simple: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    cache = SimpleNamespace(kv_offloading_size=1.5, kv_offloading_backend="native")
    theirs: Any = SimpleNamespace(cache_config=cache, kv_transfer_config=None)
    VllmConfig._post_init_kv_transfer_config(theirs)
    words = ServeArguments(["vllm", "serve", "m", "--kv-offloading-size", "1.5"], 2)
    ours = offloading_config(words, {"VLLM_USE_SIMPLE_KV_OFFLOAD": simple})
    assert ours is not None
    for name, value in ours.items():
        assert getattr(theirs.kv_transfer_config, name) == value
