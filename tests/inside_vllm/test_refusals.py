"""An engine whose cache cannot be kept says so where `infera doctor` looks, and does not start where it must not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infera_vllm.connector import InferaConnector
from infera_vllm.layout import UnsupportedLayoutError
from infera_vllm.transfer_config import own_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from infera.hooks.facts import ENGINE_FACTS


def refused_connector() -> InferaConnector:
    """Of an engine with context parallelism, whose layout is not kept."""
    parallel = SimpleNamespace(decode_context_parallel_size=2, pipeline_parallel_size=1)
    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**own_config([])), parallel_config=parallel)
    groups: Any = SimpleNamespace(kv_cache_groups=[])
    return InferaConnector(config, KVConnectorRole.SCHEDULER, groups)


def test_a_refusal_is_left_in_the_facts_and_the_engine_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "facts.json"
    monkeypatch.setenv(ENGINE_FACTS, str(path))
    monkeypatch.delenv("INFERA_REQUIRE_NATIVE", raising=False)
    connector = refused_connector()
    request: Any = SimpleNamespace()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert "context parallelism" in json.loads(path.read_text())["refused"]
    connector.shutdown()


def test_a_refusal_ends_an_engine_that_must_not_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_REQUIRE_NATIVE", "1")
    monkeypatch.delenv(ENGINE_FACTS, raising=False)
    with pytest.raises(UnsupportedLayoutError, match="context parallelism"):
        refused_connector()
