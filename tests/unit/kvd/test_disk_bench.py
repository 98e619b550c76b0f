"""`infera-kvd bench` measures a real folder, verifies what it reads, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvd.cli import main


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), "--size", "32M", "--depth", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["sizes"]) == {"1048576", "65536"}
    for passes in result["sizes"].values():
        for figures in passes.values():
            assert figures["gb_per_s"] > 0
            assert figures["wrong"] == figures["refused"] == 0
    assert result["kind"]
    assert result["way"]
    assert os.listdir(tmp_path) == []
    assert main(["bench", str(tmp_path), "--size", "8M"]) == 0
    assert "GB/s" in capsys.readouterr().out


def test_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", str(tmp_path / "file")]) == 1
    assert "cannot measure" in capsys.readouterr().err
