"""What the hook looks at before an engine starts."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from infera_vllm import plugin
from infera_vllm.plugin import infera_engine_launched

from infera.hooks.spec import Launch, Wiring


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvd.sock"


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def launched(path: Path, **environ: str) -> Wiring:
    environ |= {"INFERA_KVD_SOCKET": str(path), "INFERA_ALLOW_UNTESTED": "1"}
    launch = Launch(
        "vllm", ["/bin/vllm", "serve", "m"], ["python", "/bin/vllm", "serve", "m"], environ, "0" * 32, "/run"
    )
    wiring = infera_engine_launched(launch)
    assert wiring is not None
    return wiring


def test_a_daemon_that_answers_is_nothing_to_say(path: Path) -> None:
    with listen(path):
        assert launched(path).degraded == []


def test_without_a_daemon_the_engine_starts_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float) -> None:
        raise AssertionError("nothing waits")

    monkeypatch.setattr(time, "sleep", refuse)
    (said,) = launched(path).degraded
    assert f"does not answer at {path}" in said


def test_an_engine_that_needs_the_daemon_waits_for_it_but_not_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "DAEMON_WAIT_S", 0.3)
    assert launched(path, INFERA_REQUIRE_NATIVE="1").degraded
    monkeypatch.setattr(plugin, "DAEMON_WAIT_S", 30.0)
    listeners: list[socket.socket] = []
    starter = threading.Timer(0.3, lambda: listeners.append(listen(path)))
    starter.start()
    assert launched(path, INFERA_REQUIRE_NATIVE="1").degraded == []
    starter.join()
    listeners[0].close()


@pytest.mark.parametrize(
    ("engine", "argv"), [("sglang", ["/bin/vllm", "serve", "m"]), ("vllm", ["/bin/vllm", "bench", "latency"])]
)
def test_others_are_left_alone(engine: str, argv: list[str]) -> None:
    launch = Launch(engine, argv, ["python", *argv], {"INFERA_KVD_SOCKET": "/k"}, "0" * 32, "/run")
    assert infera_engine_launched(launch) is None
    assert launch.argv == argv
