"""Launch commands: what goes to the engine, what to the hooks, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infera.engine.launch import check_supported, engine_environment, explain
from infera.engine.vllm import PROGRAM, build_command
from kvd.options import OptionError


def parsed(*argv: str, **environ: str) -> tuple[object, list[str]]:
    return PROGRAM.parse_known(["--model", "m", *argv], environ)


def test_unknown_flags_go_to_the_engine_verbatim(tmp_path: Path) -> None:
    values, rest = parsed("--max-model-len", "2048", "--port", "8101", "--enforce-eager", "--", "--x", "y")
    command = build_command(values, rest, tmp_path / "python", tmp_path / "overlay")  # type: ignore[arg-type]
    assert command.argv[1:] == [
        "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--host", "127.0.0.1", "--port", "8101",
        "--max-model-len", "2048", "--enforce-eager", "--x", "y",
    ]  # fmt: skip
    (tmp_path / "vllm").write_text("")
    command = build_command(values, rest, tmp_path / "python", tmp_path / "overlay")  # type: ignore[arg-type]
    assert command.argv[:4] == [str(tmp_path / "python"), str(tmp_path / "vllm"), "serve", "m"]


def test_flags_become_the_variables_of_the_hooks(tmp_path: Path) -> None:
    values, _ = parsed("--kvd-socket", "/k", "--discovery", "http://a:1", "--discovery", "http://b:2")
    environ = engine_environment(values, tmp_path, {"PYTHONPATH": "/mine", "INFERA_ADVERTISE_HOST": "left-over"})  # type: ignore[arg-type]
    assert environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/mine"
    assert environ["INFERA_DISCOVERY"] == "http://a:1,http://b:2"
    assert environ["INFERA_KVD_SOCKET"] == "/k"
    assert "INFERA_ADVERTISE_HOST" not in environ


@pytest.mark.parametrize(
    "flags", [["--discovery-backend", "etcd"], ["--request-transport", "nats"], ["--kv-event-transport", "nats"]]
)
def test_what_is_not_built_is_refused_in_words(flags: list[str]) -> None:
    values, _ = parsed(*flags)
    with pytest.raises(OptionError, match="built yet"):
        check_supported(values)  # type: ignore[arg-type]


def test_dry_run_explains_and_hides_secrets(tmp_path: Path) -> None:
    values, rest = parsed("--discovery", "http://a:1", INFERA_JOIN_TOKEN="hush")
    text = explain(build_command(values, rest, tmp_path / "python", tmp_path), values)  # type: ignore[arg-type]
    assert "no --kvd-socket" in text
    assert "http://a:1" in text
    assert "hush" not in text


def test_model_missing_and_unknown_python_are_clear(tmp_path: Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "infera.engine.vllm", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    missing = run("--dry-run")
    assert (missing.returncode, "--model is missing" in missing.stderr) == (2, True)
    wrong = run("--model", "m", "--engine-python", str(tmp_path / "python"), "--dry-run")
    assert wrong.returncode == 2
    assert str(tmp_path / "python") in wrong.stderr
