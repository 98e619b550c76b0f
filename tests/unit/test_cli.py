"""The command `infera`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from infera import __version__, cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"infera {__version__}\n"


def test_a_misspelt_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demmo"]) == 2
    assert "did you mean demo?" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: infera {name}" in capsys.readouterr().out


def test_a_tool_error_is_one_line_and_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["overlay", "--engine-python", "/does/not/exist"]) == 1
    error = capsys.readouterr().err
    assert error == "infera overlay: /does/not/exist does not exist; --engine-python wants the path of a python\n"


def test_commands_are_imported_only_when_asked_for() -> None:
    program = (
        "import sys, infera.cli; print([m for m in sys.modules if m.startswith(('infera.up', 'infera.commands'))])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_every_module_of_the_table_exists() -> None:
    assert all(callable(importlib.import_module(module).main) for module, _ in cli.COMMANDS.values())
