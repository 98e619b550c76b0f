"""Eight clients at once against one alone, in turn."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CLIENTS = 8


class Worker:
    """A client process."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        command = [sys.executable, "-m", "infera.tools.bench.kvd.worker", str(socket_path), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read()

    def go(self, seconds: float) -> None:
        """Have it move blocks for so long."""
        assert self._process.stdin
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def read(self) -> str:
        """Its next line.

        Raises:
            RuntimeError: when it is gone.
        """
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a measuring client ended early")
        return line.strip()

    def end(self) -> None:
        """Let it leave."""
        self._process.communicate(timeout=30)


def measure_crowd(socket_path: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Bytes per second of one client and of eight, one sample a round."""
    workers = [Worker(socket_path, 100 + i) for i in range(CLIENTS)]
    samples: dict[str, list[float]] = {"one": [], "eight": []}
    for _ in range(rounds):
        samples["one"].append(_throughput(workers[:1], seconds))
        samples["eight"].append(_throughput(workers, seconds))
    for worker in workers:
        worker.end()
    return samples


def _throughput(workers: Sequence[Worker], seconds: float) -> float:
    started_s = time.perf_counter()
    for worker in workers:
        worker.go(seconds)
    moved = sum(int(worker.read()) for worker in workers)
    return moved / (time.perf_counter() - started_s)
