"""`infera doctor vllm` says what the hooks would do, by doing it to a launch that does not happen."""

from __future__ import annotations

import json
import shlex

import pytest

from infera.commands.doctor import main


@pytest.fixture(autouse=True)
def _short_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_RUNTIME_DIR", "/run/infera")


def test_what_would_be_added(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--kvd-socket",
        "/run/kvd.sock",
        "--discovery",
        "http://127.0.0.1:8000",
        "--json",
        "--",
        "MODEL",
        "--port",
        "9",
    ]
    assert main(["vllm", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["uses_kvd"]
    assert report["joins_fleet"]
    assert report["command"][:5] == ["vllm", "serve", "MODEL", "--port", "9"]
    assert "--kv-transfer-config" in report["added"]
    assert "--kv-events-config" in report["added"]


def test_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_KVD_SOCKET", "/run/kvd.sock")
    assert main(["vllm", "--", "MODEL"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("yes  KV blocks are kept")
    assert "no   the engine joins the fleet" in out
    assert shlex.split(out.splitlines()[-1])[:3] == ["vllm", "serve", "MODEL"]


def test_what_keeps_kvd_out_is_a_failure_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "--kvd-socket", "/k", "--", "MODEL", "--kv-transfer-config", "no json"]) == 1
    out = capsys.readouterr().out
    assert "left to vLLM" in out
    assert "FAIL kvd would not be used" in out


def test_without_anything_to_do_it_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "--", "MODEL"]) == 1
    assert "INFERA_KVD_SOCKET nor INFERA_DISCOVERY" in capsys.readouterr().out
