"""The bootstrap, in real Python processes: it costs and changes nothing unless asked, and breaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "infera" / "hooks" / "site"
SHOW_MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def run(code: str, path: list[Path], **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INFERA_", "PYTHON"))}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, path))} | variables
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)


def modules(path: list[Path], **variables: str) -> set[str]:
    return set(json.loads(run(SHOW_MODULES, path, **variables).stdout))


def test_without_variables_nothing_but_itself_is_loaded(tmp_path: Path) -> None:
    assert modules([SITE]) - modules([tmp_path]) == {"sitecustomize"}


@pytest.mark.parametrize("variables", [{}, {"INFERA_KVD_SOCKET": "/nowhere"}])
def test_next_sitecustomize_still_runs(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the next one')\n")
    assert run("pass", [SITE, tmp_path], **variables).stdout == "the next one\n"


def test_with_variables_only_the_finder_is_installed() -> None:
    loaded = modules([SITE], INFERA_KVD_SOCKET="/nowhere")
    assert "infera.hooks.bootstrap" in loaded
    assert not {"pluggy", "kvd.client.client", "zmq", "infera_core"} & loaded


def test_broken_installation_does_not_break_python(tmp_path: Path) -> None:
    (tmp_path / "infera").mkdir()
    (tmp_path / "infera" / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    done = run("print('fine')", [SITE, tmp_path], INFERA_KVD_SOCKET="/nowhere")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert "half installed" in done.stderr
    refused = run("print('fine')", [SITE, tmp_path], INFERA_KVD_SOCKET="/nowhere", INFERA_REQUIRE_NATIVE="1")
    assert refused.returncode != 0
    assert refused.stdout == ""


@pytest.fixture
def engine_package(tmp_path: Path) -> Path:
    """A package with the name and entry of the engine; what it does is print its command line."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(
        "import sys, os, json\nprint(json.dumps([sys.argv[1:], os.environ.get('INFERA_INCARNATION')]))\n"
    )
    about = tmp_path / "vllm-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    return tmp_path


def start(engine_package: Path, *flags: str, module: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INFERA_", "PYTHON"))}
    environ |= {"PYTHONPATH": f"{SITE}{os.pathsep}{engine_package}", "INFERA_RUNTIME_DIR": str(engine_package / "run")}
    command = [sys.executable, "-m", module or "vllm.entrypoints.openai.api_server", *flags]
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=60)


def serve(engine_package: Path, *flags: str, module: str = "", **variables: str) -> tuple[list[str], str, str]:
    done = start(engine_package, *flags, module=module, **variables)
    assert done.returncode == 0, done.stderr
    argv, incarnation = json.loads(done.stdout)
    return argv, incarnation or "", done.stderr


def test_engine_gets_connector_and_keeps_its_own_flags(engine_package: Path) -> None:
    argv, incarnation, said = serve(engine_package, "--model", "m", INFERA_KVD_SOCKET="/run/kvd.sock")
    assert argv[:2] == ["--model", "m"]
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "InferaConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert "--kv-events-config" not in argv, "nobody would listen"
    assert len(incarnation) == 32
    assert "/run/kvd.sock" in said


def test_child_of_an_engine_is_left_alone(engine_package: Path) -> None:
    argv, incarnation, said = serve(
        engine_package, "--model", "m", INFERA_KVD_SOCKET="/run/kvd.sock", INFERA_INCARNATION="a" * 32
    )
    assert (argv, incarnation, said) == (["--model", "m"], "a" * 32, "")


def test_variables_that_ask_for_nothing_change_nothing(engine_package: Path) -> None:
    argv, incarnation, _ = serve(engine_package, "--model", "m", INFERA_LOG_LEVEL="INFO")
    assert (argv, incarnation) == (["--model", "m"], "")


def test_other_program_that_imports_the_engine_is_left_alone(engine_package: Path) -> None:
    (engine_package / "tool.py").write_text(
        "import vllm, sys, os, json; print(json.dumps([sys.argv[1:], os.environ.get('INFERA_INCARNATION')]))"
    )
    argv, incarnation, _ = serve(engine_package, "x", module="tool", INFERA_KVD_SOCKET="/run/kvd.sock")
    assert (argv, incarnation) == (["x"], "")


NOT_JSON = ("--model", "m", "--kv-transfer-config", "{")


def test_degraded_engine_starts_and_says_so_unless_that_is_not_wanted(engine_package: Path) -> None:
    argv, _, said = serve(engine_package, *NOT_JSON, INFERA_KVD_SOCKET="/run/kvd.sock")
    assert argv[: len(NOT_JSON)] == list(NOT_JSON)
    assert "not used by this engine" in said
    argv, _, _ = serve(engine_package, *NOT_JSON, INFERA_KVD_SOCKET="/run/kvd.sock", INFERA_REQUIRE_NATIVE="0")
    assert argv[: len(NOT_JSON)] == list(NOT_JSON)
    refused = start(engine_package, *NOT_JSON, INFERA_KVD_SOCKET="/run/kvd.sock", INFERA_REQUIRE_NATIVE="1")
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "INFERA_REQUIRE_NATIVE is set, and infera-kvd is not used by this engine" in refused.stderr


def test_vllm_26452_another_version_is_known_before_the_engine_starts(engine_package: Path) -> None:
    (engine_package / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.1\n")
    argv, _, said = serve(engine_package, "--model", "m", INFERA_KVD_SOCKET="/run/kvd.sock")
    assert "--kv-transfer-config" not in argv
    assert "vLLM 0.33.1" in said


def test_daemon_that_does_not_answer_is_said(engine_package: Path) -> None:
    _, _, said = serve(engine_package, "--model", "m", INFERA_KVD_SOCKET="/nowhere/kvd.sock")
    assert "does not answer at /nowhere/kvd.sock" in said


def test_facts_of_a_running_engine_are_there_and_those_of_an_ended_one_go(engine_package: Path) -> None:
    (engine_package / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(
        "import os\nprint(open(os.environ['INFERA_ENGINE_FACTS']).read())\n"
    )
    first = json.loads(start(engine_package, "--model", "m", INFERA_KVD_SOCKET="/run/kvd.sock").stdout)
    assert first["kvd_socket"] == "/run/kvd.sock"
    assert first["engine_version"] == "0.32.0"
    files = list((engine_package / "run").glob("engine-*.json"))
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o777 == 0o600
    start(engine_package, "--model", "m", INFERA_KVD_SOCKET="/run/kvd.sock")
    assert not files[0].exists()
