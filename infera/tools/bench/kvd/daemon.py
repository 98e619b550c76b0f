"""A daemon of our own to measure, with folders of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from kvd import protocol
from kvd.client.connection import ClientConnection, UnavailableError
from kvd.protocol import Message

START_S_MAX = 120.0
POLL_S = 0.005
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchDaemon:
    """`infera-kvd serve` as a process; a context manager that leaves nothing behind."""

    def __init__(self, *flags: str) -> None:
        self._runtime = Path(tempfile.mkdtemp(prefix="infera-bench-"))
        self._arena = Path(tempfile.mkdtemp(prefix="infera-bench-", dir=os.environ.get("INFERA_BENCH_SHM", "/dev/shm")))
        self.socket = self._runtime / "kvd.sock"
        self._flags = ["--socket", str(self.socket), "--path", str(self._arena), "--http-port", "0", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BenchDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._runtime, ignore_errors=True)
        shutil.rmtree(self._arena, ignore_errors=True)

    def start(self) -> float:
        """Start it; returns the seconds until it answered.

        Raises:
            RuntimeError: when it ends or does not answer in two minutes.
        """
        started_s = time.perf_counter()
        log = self._runtime / "log"
        with log.open("ab") as out:
            command = [sys.executable, "-m", "kvd", "serve", *self._flags]
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        while time.perf_counter() - started_s < START_S_MAX:
            if self._process.poll() is not None:
                break
            try:
                self.status()
            except UnavailableError:
                time.sleep(POLL_S)
                continue
            return time.perf_counter() - started_s
        raise RuntimeError(f"infera-kvd did not start:\n{log.read_text()}")

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        connection = ClientConnection.open(self.socket, 60.0)
        try:
            return protocol.decode_json(connection.call(Message.STATUS, b""))
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """Processor time it has used, all threads."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
