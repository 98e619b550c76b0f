"""Settings of a fleet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infera.tools.engine_python import EnginePython
from infera.up.settings import RUNS_KEPT_MAX, FleetSettings, make_run_folder, served_name_of

ENGINE = EnginePython(Path("/p"), (3, 11, 0), "vllm", "0.32.0", True, ())


def settings(port: int) -> FleetSettings:
    return FleetSettings("m", "m", ENGINE, Path("/o"), Path("/r"), port=port)


def test_fleets_on_other_ports_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_RUNTIME_DIR", "/run/x")
    one, two = settings(8000), settings(8001)
    assert one.kvd_socket == Path("/run/x/up-8000/kvd.sock")
    assert one.kvd_socket != two.kvd_socket
    assert one.arena_folder != two.arena_folder


def test_served_names(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert served_name_of(str(tmp_path / "my-model") + "/") == "my-model"
    assert served_name_of("owner/name") == "owner/name"


def test_old_runs_are_removed(tmp_path: Path) -> None:
    for index in range(RUNS_KEPT_MAX + 5):
        (tmp_path / "runs" / f"2000010{index:02}-000000-1").mkdir(parents=True)
    folder = make_run_folder(tmp_path)
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(left) == RUNS_KEPT_MAX
    assert left[-1] == folder.name
    assert folder.name.endswith(f"-{os.getpid()}")
