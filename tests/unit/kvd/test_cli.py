"""`infera-kvd`: mistakes are answered with what to write instead."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli import main
from kvd.program import PROGRAMS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out and program.summary in out for name, program in PROGRAMS.items())


@pytest.mark.parametrize(("word", "meant"), [("staus", "status"), ("server", "serve"), ("drpo", "drop")])
def test_an_unknown_command_gets_a_suggestion(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"unknown command {word!r}; did you mean {meant}?" in capsys.readouterr().err


def test_an_unknown_command_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy"]) == 2
    error = capsys.readouterr().err
    assert "did you mean" not in error
    assert "infera-kvd --help" in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "much"], "not a size"),
        (["--memory", "10K"], "at least 1M"),
        (["--shards-max", "65"], "at most 64"),
        (["--shards-max", "0"], "at least 1"),
        (["--http-port", "70000"], "not a port"),
        (["--http-port", "-1"], "not a port"),
        (["--records", "none"], "not a count"),
        (["--memry", "1G"], "did you mean --memory"),
    ],
)
def test_a_bad_flag_is_refused_in_words(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *arguments])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_bad_log_level_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERA_LOG_LEVEL", "loud")
    assert main(["serve"]) == 2
    assert "use DEBUG, INFO, WARNING or ERROR" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["drop", "ab" * 16]])
def test_without_a_daemon_the_error_says_how_to_start_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvd.sock"
    assert main([*command, "--socket", str(path)]) == 1
    captured = capsys.readouterr()
    assert f"start one with: infera-kvd serve --socket {path}" in captured.err
    assert captured.out == ""


def test_something_else_on_the_socket_is_an_error_not_a_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert main(["status", "--socket", str(path)]) == 1  # accepts, never answers
    assert "does not answer" in capsys.readouterr().err


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", "serve", "--memory", "1M", "--http-port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--records", "9999999999"], "lower --records"),
        (["--memory", "900000T"], "lower --memory"),
        (["--path", "/proc/arena"], "choose another folder with --path"),
    ],
)
def test_a_daemon_that_cannot_start_says_why_and_leaves_nothing(flags: list[str], says: str, tmp_path: Path) -> None:
    arena = [] if "--path" in flags else ["--path", str(tmp_path / "arena")]
    ended = serve("--socket", str(tmp_path / "s"), *arena, *flags)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert left == []


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    ended = serve("--path", str(tmp_path / "arena"), "--socket", str(tmp_path / ("x" * 120)))
    assert ended.returncode == 1
    assert "too long for a socket" in ended.stderr
    assert not (tmp_path / "arena").exists()


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    ended = serve("--path", str(tmp_path / "arena"), "--socket", str(tmp_path / "notes.txt"))
    assert ended.returncode == 1
    assert "is not a socket and is left alone" in ended.stderr
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_a_port_in_use_names_the_flag_and_the_arena_is_taken_away(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = serve("--path", str(tmp_path / "arena"), "--socket", str(tmp_path / "s"), "--http-port", port)
    assert ended.returncode == 1
    assert "choose another --http-port" in ended.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["arena", "lock"]


def test_status_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The error path prints no JSON, so that a script can tell."""
    main(["status", "--json", "--socket", "/nonexistent/kvd.sock"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(capsys.readouterr().out)
