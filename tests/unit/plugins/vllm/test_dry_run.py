"""What would be wired, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infera_vllm.dry_run import dry_run

API = "vllm.entrypoints.openai.api_server"


def answer(words: list[str], version: str = "0.32.0", **environ: str) -> dict[str, Any]:
    return dry_run(words, environ, version)


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "--port", "1"],
        ["serve", "m", "--port", "1"],
        ["/env/bin/vllm", "serve", "m", "--port", "1"],
        ["/env/bin/python", "/env/bin/vllm", "serve", "m", "--port", "1"],
        ["python3.11", "-m", API, "--model", "m", "--port", "1"],
        ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m", "--port", "1"],
    ],
)
def test_every_way_to_serve(words: list[str]) -> None:
    found = answer(words, INFERA_KVD_SOCKET="/k")
    assert found["serves"]
    given = ["vllm", *words] if words[0] == "serve" else words
    assert found["command"][: len(given)] == given
    config = json.loads(found["command"][found["command"].index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "InferaConnector"
    assert found["degraded"] == []


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "bench", "latency"],
        ["vllm"],
        ["python"],
        ["python", "-m", "http.server"],
        ["train.py", "serve"],
        ["ls"],
    ],
)
def test_what_does_not_serve(words: list[str]) -> None:
    assert answer(words, INFERA_KVD_SOCKET="/k") == {"version": "0.32.0", "serves": False}


def test_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fleet = {"INFERA_DISCOVERY": "http://127.0.0.1:1", "INFERA_RUNTIME_DIR": str(folder)}
    assert answer(["vllm", "serve", "m"], INFERA_KVD_SOCKET="/k", **fleet)["degraded"] == []
    assert not folder.exists()


def test_a_runtime_folder_that_is_too_long_is_a_finding() -> None:
    fleet = {"INFERA_DISCOVERY": "http://127.0.0.1:1", "INFERA_RUNTIME_DIR": "/" + "x" * 100}
    (problem,) = answer(["vllm", "serve", "m"], **fleet)["degraded"]
    assert "INFERA_RUNTIME_DIR" in problem
