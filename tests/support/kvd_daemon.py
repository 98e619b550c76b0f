"""The real daemon as a process, with an arena of its own on tmpfs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvd.client.connection import ClientConnection, UnavailableError
from kvd.protocol import Message, encode_json
from tests.support.processes import ROOT, wait_until

MEMORY = "64M"


class DaemonProcess:
    """`python -m kvd serve`. `start` may be called again after `kill` or `stop`."""

    def __init__(self, *flags: str, memory: str = MEMORY) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.arena = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/dev/shm"))
        self.socket = self.runtime / "kvd.sock"
        self.log = self.runtime / "log"
        self.flags = ["--memory", memory, "--http-port", "0", *flags]
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> DaemonProcess:
        """Start and wait until it answers."""
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen([*self.command(), *self.flags], cwd=ROOT, stdout=log, stderr=log)
        wait_until(self._is_ready, "kvd is ready")
        return self

    def command(self) -> list[str]:
        """The command without size and port."""
        return [sys.executable, "-m", "kvd", "serve", "--socket", str(self.socket), "--path", str(self.arena)]

    def _is_ready(self) -> bool:
        assert self.popen is not None
        assert self.popen.poll() is None, self.log_text()
        try:
            self.status()
        except UnavailableError:
            return False
        return True

    def status(self, *, audit: bool = False) -> dict[str, Any]:
        """What the daemon says of itself."""
        connection = ClientConnection.open(self.socket, timeout_s=10)
        try:
            facts: dict[str, Any] = json.loads(connection.call(Message.STATUS, encode_json({"audit": audit})))
        finally:
            connection.close()
        return facts

    def metrics(self) -> dict[str, int]:
        """Its counters."""
        metrics: dict[str, int] = self.status()["metrics"]
        return metrics

    def drop(self, namespace: bytes) -> int:
        """Drop a namespace; returns how many records went."""
        connection = ClientConnection.open(self.socket, timeout_s=10)
        try:
            answer = connection.call(Message.DROP, encode_json({"namespace": namespace.hex()}))
        finally:
            connection.close()
        return int(json.loads(answer)["dropped"])

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.popen is not None
        self.popen.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until all its threads have stopped. SIGCONT lets it go on."""
        self.send(signal.SIGSTOP)
        assert self.popen is not None
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self.popen is not None
        self.popen.terminate()
        return self.popen.wait(20)

    def log_text(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(errors="replace")

    def clean_up(self) -> None:
        """End it and remove its folders."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(self.arena, ignore_errors=True)


def running(*flags: str, memory: str = MEMORY) -> Iterator[DaemonProcess]:
    """Body of a fixture: a daemon that runs, and is gone with all its files afterwards."""
    made = DaemonProcess(*flags, memory=memory)
    try:
        yield made.start()
    finally:
        made.clean_up()
