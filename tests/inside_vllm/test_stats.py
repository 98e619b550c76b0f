"""What is counted arrives at the engine's /metrics, through vLLM's own classes, alone and beside another connector."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import infera_vllm
import infera_vllm.connector
import pytest
from infera_vllm.stats import COUNTERS, PREFIX, InferaStats
from infera_vllm.transfer_config import combine
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

LABELS = {"model_name": "m", "engine": "1"}


def config_of(given: dict[str, Any] | None) -> Any:
    combined = combine(given)
    assert combined.config is not None
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(**combined.config))


ALONE = config_of(None)
BESIDE = config_of({"kv_connector": "ExampleConnector", "kv_role": "kv_both", "engine_id": "e"})


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}_total", {**LABELS, **labels}) or 0.0


def counters(config: Any) -> KVConnectorProm:
    return KVConnectorProm(config, list(LABELS), {0: ["m", "0"], 1: ["m", "1"]})


def counted() -> InferaStats:
    stats = InferaStats()
    stats.add("hit_tokens", 64, "ram")
    stats.add("loads", kind="loaded")
    stats.add("loads", 2, kind="deadline")
    stats.add("worker_seconds", 0.25)
    return stats


@pytest.mark.parametrize("config", [ALONE, BESIDE])
def test_what_is_counted_is_shown(config: Any) -> None:
    before = [value("hit_tokens", tier="ram"), value("loads", outcome="deadline"), value("worker_seconds")]
    stats: Any = counted()
    if config is BESIDE:
        stats = MultiKVConnectorStats({"InferaConnector": stats})
    prom = counters(config)
    prom.observe(stats.to_dict(), 1)
    prom.observe(stats.to_dict(), 1)
    after = [value("hit_tokens", tier="ram"), value("loads", outcome="deadline"), value("worker_seconds")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [128, 4, 0.5]


def test_a_second_engine_in_the_process_counts_on() -> None:
    before = value("loaded_blocks")
    for _ in range(2):
        counters(ALONE).observe({"loaded_blocks": 3}, 1)
    assert value("loaded_blocks") == before + 6


@pytest.mark.parametrize("config", [ALONE, BESIDE])
def test_the_log_line_of_an_interval(config: Any) -> None:
    """vLLM finds a child's class by its name there: without our registration the engine would end with its first
    statistics."""
    said: list[str] = []
    stats: Any = counted()
    if config is BESIDE:
        stats = MultiKVConnectorStats({"InferaConnector": stats})
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe(stats.to_dict())
    logging.observe(stats.to_dict())
    logging.log(lambda text, *values: said.append(text % values))
    (line,) = said
    assert "infera-kvd hit tokens" in line
    assert "128" in line
    assert "4" in line


def test_workers_and_scheduler_add_up() -> None:
    together = counted().aggregate(counted())
    assert together.data == {"hit_tokens:ram": 128, "loads:loaded": 2, "loads:deadline": 4, "worker_seconds": 0.5}
    assert together.reduce()["failed loads"] == 4
    assert InferaStats().aggregate(counted()).data == counted().data


def test_taking_begins_anew() -> None:
    stats = counted()
    taken = stats.take()
    assert taken is not None
    assert taken.data == counted().data
    assert stats.take() is None
    assert stats.is_empty()
    stats.add("loads", 0)
    assert stats.is_empty()
    taken.reset()
    assert taken.is_empty()


def test_multi_connector_aggregates_ours() -> None:
    first = MultiKVConnectorStats({"InferaConnector": counted()})
    second = MultiConnector.build_kv_connector_stats({"InferaConnector": counted().to_dict()})
    assert second is not None
    assert first.aggregate(second).data["InferaConnector"].data["hit_tokens:ram"] == 128


def test_every_name_that_is_counted_is_shown() -> None:
    """A name that the counters do not know would end the engine's front end."""
    used: dict[str, bool] = {}
    for path in Path(infera_vllm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"):
                continue
            if "stats" not in ast.unparse(node.func.value) or not isinstance(node.args[0], ast.Constant):
                continue
            has_kind = len(node.args) == 3 or any(word.arg == "kind" for word in node.keywords)
            assert used.setdefault(str(node.args[0].value), has_kind) == has_kind, ast.unparse(node)
    assert used == {name: bool(labels) for name, (_, labels) in COUNTERS.items()}


def test_the_connector_has_what_multi_connector_asks_of_its_children() -> None:
    """Nothing of vLLM's interface is left to a default that would switch something off for the others."""
    nixl = config_of({"kv_connector": "NixlConnector", "kv_role": "kv_both"}).kv_transfer_config
    assert MultiConnector.all_children_support_hma(nixl)
