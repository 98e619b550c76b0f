"""Reading vLLM's command line the way vLLM does."""

from __future__ import annotations

from pathlib import Path

import pytest
from infera_vllm.arguments import ServeArguments, find_serve_arguments

API = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("argv", "original", "start"),
    [
        (["/env/bin/vllm", "serve", "m", "--port", "1"], ["python", "/env/bin/vllm", "serve", "m"], 2),
        (["-m", "--model", "m"], ["python", "-m", API, "--model", "m"], 1),
        (["-m", "serve", "m"], ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"], 2),
        (["/env/bin/vllm", "bench", "latency"], ["python", "/env/bin/vllm", "bench", "latency"], None),
        (["/env/bin/vllm"], ["python", "/env/bin/vllm"], None),
        (["train.py", "serve"], ["python", "train.py", "serve"], None),
        ([""], ["python"], None),
    ],
)
def test_which_processes_serve(argv: list[str], original: list[str], start: int | None) -> None:
    found = find_serve_arguments(argv, original)
    assert (found.start if found else None) == start


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--kv-transfer-config", "{}"], "{}"),
        (["--kv-transfer-config={}"], "{}"),
        (["--kv_transfer_config", "{}"], "{}"),
        (["--kv-transfer-config.kv_connector", "X"], "X"),
        (["--kv-transfer-config", "a", "--kv-transfer-config", "b"], "b"),
        (["--kv-transfer-config"], ""),
        (["--kv-transfer-config", "--port", "1"], ""),
        (["--kv-transfer-configs", "{}"], None),
        (["kv-transfer-config"], None),
        ([], None),
    ],
)
def test_flag_in_every_spelling(words: list[str], value: str | None) -> None:
    assert ServeArguments(["vllm", "serve", *words], 2).find("--kv-transfer-config") == value


def test_flag_in_the_config_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text('model: m\nkv_transfer_config: \'{"kv_connector": "X"}\'\nport: 9\n')
    arguments = ServeArguments(["vllm", "serve", "--config", str(path)], 2)
    assert arguments.find("--kv-transfer-config") == '{"kv_connector": "X"}'
    assert arguments.find("--port") == "9"
    assert arguments.find("--host") is None


def test_missing_config_file_is_left_to_vllm(tmp_path: Path) -> None:
    assert ServeArguments(["vllm", "serve", "--config", str(tmp_path / "no")], 2).find("--port") is None
