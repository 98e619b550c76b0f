"""`infera up` as a user runs it: a real engine, a request, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infera.tools.models import prepare_tiny
from infera.up.guard import living_members
from tests.support.processes import call, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

READY_LIMIT_S = 300.0
END_LIMIT_S = 60.0


@dataclass
class Running:
    """A running `infera up` and where it puts things."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    runtime: Path

    def pids_of_children(self) -> list[int]:
        """Its children, which lead groups of their own."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]


def wait_until(is_true: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.2)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Running]:
    port, log = free_port(), tmp_path / "up.log"
    runtime = tmp_path / "run"
    if len(str(runtime)) > 60:  # the path of a unix socket has at most 107 bytes
        runtime = Path(f"/tmp/infera-test-{os.getpid()}")
    argv = [sys.executable, "-m", "infera", "up", str(prepare_tiny()), "--served-model-name", "tiny"]
    argv += [
        "--port",
        str(port),
        "--kvd-memory",
        "64M",
        "--",
        "--max-model-len",
        "2048",
        "--num-gpu-blocks-override",
        "80",
    ]
    with log.open("wb") as output:
        environ = {**os.environ, "INFERA_RUNTIME_DIR": str(runtime)}
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environ, start_new_session=True)
    running = Running(process, port, log, runtime)
    try:
        wait_until(
            lambda: "ready: http" in log.read_text() or process.poll() is not None,
            READY_LIMIT_S,
            lambda: log.read_text(),
        )
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_LIMIT_S)


def test_it_serves_and_ends_cleanly(up: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "def main"}], "max_tokens": 4}
    reply = call(f"http://127.0.0.1:{up.port}/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    groups = up.pids_of_children()
    assert len(groups) == 4  # the guard, kvd, the server, an engine
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(END_LIMIT_S) == 0, up.log.read_text()
    assert up.log.read_text().endswith("everything has ended\n")
    assert [group for group in groups if living_members(group)] == []
    assert not (up.runtime / f"up-{up.port}").exists()
    assert list(Path("/dev/shm").glob(f"infera-up-*-{up.port}")) == []


def test_nothing_is_left_when_it_is_killed(up: Running) -> None:
    groups = up.pids_of_children()
    up.process.kill()
    up.process.wait()
    wait_until(
        lambda: not any(living_members(group) for group in groups),
        END_LIMIT_S,
        lambda: f"still alive: {[living_members(group) for group in groups]}",
    )
    arenas = Path("/dev/shm")
    wait_until(lambda: not list(arenas.glob(f"infera-up-*-{up.port}")), END_LIMIT_S, lambda: "the arena is still there")
