"""`infera doctor vllm`: what it says, and its status. The real engine is asked in tests/e2e/test_by_hand.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from infera.commands import doctor, doctor_vllm
from infera.hooks.facts import begin_facts, facts_path
from infera.tools.engine_python import EnginePython
from infera.tools.errors import ToolError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Our own Python in the place of an engine's: it has the plugin, and a vLLM by its metadata only."""
    about = tmp_path / "site" / "vllm-0.32.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    overlay = os.pathsep.join(map(str, (tmp_path / "site", ROOT / "plugins" / "vllm", ROOT, ROOT / "csrc")))
    python = EnginePython(Path(sys.executable), (3, 11, 0), "vllm", "0.32.0", True, ())
    monkeypatch.setattr(doctor_vllm, "inspect_engine_python", lambda path: python)
    monkeypatch.setenv("INFERA_OVERLAY", overlay)
    monkeypatch.setenv("INFERA_ENGINE_PYTHON", sys.executable)
    monkeypatch.setenv("INFERA_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return about / "METADATA"


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = doctor.main(["vllm", "--json", "--no-load", *argv])
    return status, json.loads(capsys.readouterr().out)


def of(found: dict[str, Any], what: str) -> list[tuple[bool | None, str]]:
    return [(one["is_good"], one["detail"]) for one in found["findings"] if one["what"] == what]


@pytest.mark.usefixtures("engine")
def test_what_would_be_wired(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--kvd-socket", str(tmp_path / "none"), "--", "vllm", "serve", "m", "--port", "1"]
    status, found = report(capsys, *argv)
    assert found["command"][:5] == ["vllm", "serve", "m", "--port", "1"]
    assert "--kv-transfer-config" in found["command"]
    assert any("KV blocks are kept" in detail for _, detail in of(found, "wiring"))
    assert of(found, "kvd")[0][0] is False
    assert status == 1, "kvd does not answer"


@pytest.mark.usefixtures("engine")
def test_status_is_good_when_all_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, "--discovery", "http://127.0.0.1:1", "--", "vllm", "serve", "m")
    assert status == 0, found
    assert "--kv-events-config" in found["command"]


@pytest.mark.usefixtures("engine")
def test_without_variables_the_hooks_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys)
    assert status == 1
    assert "INFERA_KVD_SOCKET" in of(found, "wiring")[0][1]


def test_vllm_26452_another_version_is_found_before_the_engine_is_started(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.write_text("Name: vllm\nVersion: 0.33.0\n")
    _, found = report(capsys, "--kvd-socket", "/k", "--", "vllm", "serve", "m")
    assert any(good is False and "0.33.0" in detail for good, detail in of(found, "wiring"))


@pytest.mark.usefixtures("engine")
def test_vllm_26452_a_connector_that_does_not_load_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no vLLM to load it into here."""
    assert doctor.main(["vllm", "--json", "--kvd-socket", "/k"]) == 1
    found = json.loads(capsys.readouterr().out)
    ((good, detail),) = of(found, "connector")
    assert good is False
    assert "vllm" in detail


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("words", [["vllm", "bench", "latency"], ["ls", "-l"]])
def test_misuse_is_said_in_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["vllm", "--no-load", "--", *words]) == 2
    assert "does not serve" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        doctor.main(["vllm", *words])
    assert usage.value.code == 2


def test_no_engine_is_a_finding_with_a_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: None)
    status, found = report(capsys)
    assert status == 1
    assert "--engine-python" in of(found, "engine")[0][1]


def test_an_overlay_that_does_not_work_is_a_finding(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "infera_vllm").mkdir()
    (tmp_path / "infera_vllm" / "__init__.py").write_text("raise RuntimeError('half built')\n")
    monkeypatch.setenv("INFERA_OVERLAY", str(tmp_path))
    status, found = report(capsys)
    assert status == 1
    assert "half built" in of(found, "engine")[0][1]


@pytest.mark.usefixtures("engine")
def test_running_engines_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = {"url": "http://127.0.0.1:1", "engine_version": "0.32.0", "kvd_socket": "/k", "notes": ["n"], "degraded": []}
    begin_facts(facts_path(str(tmp_path / "run"), "a"), base | {"layout": "all in blocks of 16 tokens"})
    begin_facts(facts_path(str(tmp_path / "run"), "b"), base | {"refused": "context parallelism is configured"})
    begin_facts(facts_path(str(tmp_path / "run"), "c"), base)
    status, found = report(capsys, "--discovery", "http://127.0.0.1:1")
    assert status == 1
    assert [good for good, _ in of(found, "running engine")] == [True, False, None]
    assert "context parallelism" in of(found, "running engine")[1][1]
    assert len(found["engines"]) == 3


@pytest.mark.usefixtures("engine")
def test_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.main(["vllm", "--no-load", "--kvd-socket", str(tmp_path / "none"), "--", "vllm", "serve", "m"]) == 1
    text = capsys.readouterr().out
    assert "FAIL kvd" in text
    assert text.splitlines()[-1].startswith("vllm serve m")


def test_a_python_without_an_engine_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, "--engine-python", "/nowhere/python")
    assert status == 1
    assert "does not exist" in of(found, "engine")[0][1]
    assert issubclass(ToolError, Exception)
