"""Starts our server and fake engines as real processes, and talks to them over real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S_MAX = 60.0
WAIT_S_MAX = 30.0


@dataclass
class Reply:
    """An answer to a test's request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of an event stream's frames, parsed where it is JSON."""
        found = []
        for line in self.body.decode().splitlines():
            if line.startswith("data: "):
                text = line[6:]
                found.append(text if text == "[DONE]" else json.loads(text))
        return found


def call(
    url: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    method: str | None = None,
    timeout_s: float = 30,
) -> Reply:
    """One request with the standard library's client, which shares no code with ours."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return Reply(answer.status, {key.lower(): value for key, value in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, {key.lower(): value for key, value in error.headers.items()}, error.read())


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S_MAX) -> Any:
    """Poll until ``condition`` holds; its value. Fails the test with ``what`` when it never does."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"never happened: {what}")


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Process:
    """A process of ours and where it listens."""

    url: str
    popen: subprocess.Popen[str]
    log: Path

    def stop(self, how: int = signal.SIGTERM, timeout_s: float = 20) -> int:
        """Signal it and wait; its exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise

    def log_text(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Cluster:
    """A server and its engines; everything ends with the test."""

    runtime: Path
    folder: Path
    processes: list[Process] = field(default_factory=list)
    server: Process | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        assert self.server is not None
        return self.server.url

    def start_server(self, *flags: str, environ: dict[str, str] | None = None) -> Process:
        """Start ``python -m infera.server`` and wait until it is alive."""
        port = free_port()
        self.server = self._start(port, ["infera.server", "--port", str(port), *flags], environ)
        wait_until(lambda: _is_alive(f"{self.url}/health", self.server), "the server is alive", START_S_MAX)
        return self.server

    def start_engine(self, *flags: str, joins: bool = True) -> Process:
        """Start a fake engine; with ``joins``, wait until the server knows it."""
        port = free_port()
        arguments = ["tests.support.fake_engine", "--port", str(port), "--folder", str(self.folder)]
        arguments += ["--runtime", str(self.runtime), *flags]
        if joins:
            arguments += ["--server", self.url]
        engine = self._start(port, arguments, None)
        wait_until(lambda: _is_alive(f"{engine.url}/control", engine), "the engine is alive", START_S_MAX)
        if joins:
            wait_until(lambda: engine.url in self.known_urls(), "the engine joined")
        return engine

    def known_urls(self) -> list[str]:
        """Addresses of the workers the server knows."""
        reply = call(f"{self.url}/v1/workers", headers={"authorization": "Bearer test-key"})
        return [entry["record"]["url"] for entry in reply.json["data"]]

    def stop_all(self) -> None:
        """End everything, newest first."""
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()

    def _start(self, port: int, arguments: list[str], environ: dict[str, str] | None) -> Process:
        log = self.runtime / f"{arguments[0]}-{port}.log"
        with log.open("w") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env={**os.environ, **(environ or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        process = Process(f"http://127.0.0.1:{port}", popen, log)
        self.processes.append(process)
        return process


def _is_alive(url: str, process: Process | None) -> bool:
    assert process is not None
    if process.popen.poll() is not None:
        raise AssertionError(f"ended with {process.popen.returncode}:\n{process.log_text()[-3000:]}")
    try:
        return call(url, timeout_s=2).status == 200
    except OSError:
        return False


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose sockets lie in a short path of their own (ipc paths have 107 characters at most)."""
    with tempfile.TemporaryDirectory(prefix="infera-") as runtime:
        made = Cluster(Path(runtime), folder)
        try:
            yield made
        finally:
            made.stop_all()


def engine_stats(engine: Process) -> Any:
    """What a fake engine saw."""
    return call(f"{engine.url}/control").json


def control(engine: Process, **wanted: Any) -> None:
    """Tell a fake engine how to behave."""
    assert call(f"{engine.url}/control", wanted).status == 200
