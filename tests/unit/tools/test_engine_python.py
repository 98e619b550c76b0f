"""Looking at a Python that should have an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infera.tools.engine_python import environment_without_infera, inspect_engine_python
from infera.tools.errors import ToolError


def test_an_engine_is_found_without_importing_it() -> None:
    # Any installed distribution will do for the looking; importing this one as an engine would fail.
    found = inspect_engine_python(Path(sys.executable), "pluggy")
    assert found.engine_version.count(".") >= 1
    assert found.python_version == sys.version_info[:3]
    assert found.missing_modules == ()
    assert not found.is_cpu
    assert str(found.python) == sys.executable  # the environment's link is kept, not followed


def test_the_cure_is_named_when_there_is_no_engine() -> None:
    with pytest.raises(ToolError, match="cannot import no_such_engine.*infera engine-env install"):
        inspect_engine_python(Path(sys.executable), "no_such_engine")


def test_a_path_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="does not exist"):
        inspect_engine_python(tmp_path / "python")
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(ToolError, match="no usable Python: broken"):
        inspect_engine_python(script)
    script.chmod(0o644)
    with pytest.raises(ToolError, match="could not be run"):
        inspect_engine_python(script)


def test_children_do_not_inherit_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_DISCOVERY", "http://127.0.0.1:1")
    monkeypatch.setenv("KEPT", "1")
    environ = environment_without_infera()
    assert "INFERA_DISCOVERY" not in environ
    assert environ["KEPT"] == "1"
