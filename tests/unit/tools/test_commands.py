"""Long commands: bounded, logged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infera.tools.commands import run_logged, tail
from infera.tools.errors import ToolError


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        run_logged([sys.executable, "-c", f"print({word!r})"], what="printing", log=log, limit_s=30.0)
    assert log.read_text() == "one\ntwo\n"


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; print('no space left'); sys.exit(4)"]
    with pytest.raises(ToolError, match=r"(?s)copying failed with status 4.*no space left"):
        run_logged(argv, what="copying", log=tmp_path / "log", limit_s=30.0)


def test_a_command_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ToolError, match="took longer than 0 s and was stopped"):
        run_logged(argv, what="sleeping", log=tmp_path / "log", limit_s=0.2)


def test_a_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first line\nsecond\nthird\n")
    assert tail(log, 15) == "second\nthird"
    assert tail(log) == "first line\nsecond\nthird"
    assert tail(tmp_path / "none") == ""
