"""A fleet on one host: the cache daemon, the server and N engines, started in this order and ended in reverse.

with Fleet(settings) as fleet:
    fleet.start()
    fleet.wait(stop)
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from infera.tools.engine_python import environment_without_infera
from infera.tools.errors import ToolError
from infera.tools.progress import Progress, say
from infera.up.cpu_engine import cpu_environment, cpu_flags, has_flag
from infera.up.http import get_json, get_status
from infera.up.ports import PortReservations
from infera.up.process import Child, ChildDied, Guard
from infera.up.settings import FleetSettings

KVD_HTTP_PORT_FIRST = 9400
KVD_READY_LIMIT_S = 120.0
SERVER_READY_LIMIT_S = 60.0
ENGINE_READY_LIMIT_S = 30 * 60.0
JOIN_LIMIT_S = 60.0
LEAVE_LIMIT_S = 30.0
WATCH_INTERVAL_S = 0.5
ENGINE_POLL_S = 0.5  # each look is a line in the engine's log
DETAILS_FLAG = "--enable-prompt-tokens-details"


class Fleet:
    """Owns the processes of a run. Use it as a context manager; leaving it ends everything it started."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.engine_ports: list[int] = []
        self.kvd_http_port = 0
        self._ports = PortReservations()
        self._guard: Guard | None = None
        self._kvd: Child | None = None
        self._server: Child | None = None
        self._engines: list[Child] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    @property
    def engines(self) -> tuple[Child, ...]:
        """The engines that run now, in the order of `engine_ports`."""
        return tuple(self._engines)

    @property
    def kvd(self) -> Child:
        """The cache daemon. Raises ToolError before `start`."""
        if self._kvd is None:
            raise ToolError("the cache daemon has not been started")
        return self._kvd

    def start(self) -> None:
        """Starts everything and returns when each engine has joined. Raises ToolError, ChildDied."""
        self._ports.reserve_exactly(self.settings.port)
        say(f"logs: {self.settings.run_folder}")
        self._guard = Guard()
        self._guard.remove_at_end(self.settings.arena_folder)
        self._guard.remove_at_end(self.settings.runtime_folder)
        self.engine_ports = self._ports.reserve(self.settings.engines)
        (self.kvd_http_port,) = self._ports.reserve(1, first=KVD_HTTP_PORT_FIRST)
        if not self.settings.keeps_arena:
            shutil.rmtree(self.settings.arena_folder, ignore_errors=True)
        self._start_kvd()
        self._start_server()
        self.start_engines()

    def start_engines(self) -> None:
        """Starts the engines side by side and waits until each is in the fleet."""
        count = self.settings.engines
        say(f"starting {count} engine{'s' if count > 1 else ''} (vLLM {self.settings.engine_python.engine_version})")
        self._engines = [self._start_engine(index) for index in range(count)]
        for engine, port in zip(self._engines, self.engine_ports, strict=True):
            self._wait_for_engine(engine, port)
        if get_status(self.settings.port, "/ready") != 200:
            raise ToolError(f"every engine has joined, but {self.settings.server_url}/ready does not say so")

    def stop_engines(self) -> None:
        """Stops all engines and waits until they have left the fleet."""
        say(f"stopping {len(self._engines)} engines")
        self._stop_all(self._engines)
        self._engines = []
        progress = Progress("waiting until the engines have left the fleet")
        wake = threading.Event()
        while self.worker_ports():
            if progress.elapsed_s > LEAVE_LIMIT_S:
                raise ToolError(f"stopped engines are still in the fleet after {LEAVE_LIMIT_S:.0f} s: {self.workers()}")
            progress.tick()
            wake.wait(0.1)

    def restart_kvd(self) -> None:
        """Starts the cache daemon again after its death; engines come back to it by themselves."""
        self.kvd.stop()
        self._start_kvd()

    def workers(self) -> list[dict[str, Any]]:
        """What the server says about its workers; empty when it does not answer."""
        answer = get_json(self.settings.port, "/v1/workers") or {}
        workers: list[dict[str, Any]] = answer.get("data", [])
        return workers

    def worker_ports(self) -> set[int]:
        """The ports of the workers that the server knows."""
        ports = (urlsplit(worker["record"]["url"]).port for worker in self.workers())
        return {port for port in ports if port is not None}

    def wait(self, stop: threading.Event) -> None:
        """Watches the fleet until `stop` is set.

        The death of the cache daemon, or of one engine of several, is reported and the rest serves on. Raises ChildDied
        when the server or the last engine has died.
        """
        reported: set[int] = set()
        while not stop.wait(WATCH_INTERVAL_S):
            for child in self._children():
                if child.pid in reported:
                    continue
                try:
                    child.check()
                except ChildDied as death:
                    is_last = child in self._engines and all(engine.status() is not None for engine in self._engines)
                    if child is self._server or is_last:
                        raise
                    reported.add(child.pid)
                    say(f"{death}\nthe rest of the fleet serves on; `infera up` again to have all of it")

    def stop(self) -> None:
        """Ends everything in reverse order; may be repeated, and called after a start that failed half way."""
        if self._guard is None:
            self._ports.close()
            return
        self._stop_all(self._engines)
        for child in (self._server, self._kvd):
            if child is not None:
                child.stop()
        self._engines, self._server, self._kvd = [], None, None
        self._guard.close()
        self._guard = None
        self._ports.close()

    def _children(self) -> list[Child]:
        return [child for child in (self._kvd, self._server, *self._engines) if child is not None]

    def _stop_all(self, children: Sequence[Child]) -> None:
        for child in children:
            child.ask_to_stop()
        for child in children:
            child.stop()

    def _start_kvd(self) -> None:
        settings = self.settings
        settings.runtime_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = [sys.executable, "-m", "kvd", "serve", "--socket", str(settings.kvd_socket)]
        argv += ["--memory", settings.kvd_memory, "--path", str(settings.arena_folder)]
        argv += ["--http-port", str(self.kvd_http_port)]
        say(f"starting the cache daemon with {settings.kvd_memory} of memory")
        self._kvd = self._spawn("kvd", argv, {})
        self._kvd.wait_ready(lambda: get_status(self.kvd_http_port, "/ready") == 200, limit_s=KVD_READY_LIMIT_S)

    def _start_server(self) -> None:
        port = self.settings.port
        argv = [sys.executable, "-m", "infera.server", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--router-policy", "kv-aware", *self.settings.server_flags]
        say(f"starting the server on {self.settings.server_url}")
        self._server = self._spawn("server", argv, {})
        self._server.wait_ready(lambda: get_status(port, "/health") == 200, limit_s=SERVER_READY_LIMIT_S)

    def _start_engine(self, index: int) -> Child:
        settings = self.settings
        argv = [sys.executable, "-m", "infera.engine.vllm", "--engine-python", str(settings.engine_python.python)]
        argv += ["--overlay", str(settings.overlay), "--model", settings.model]
        argv += ["--served-model-name", settings.served_name]
        argv += ["--host", "127.0.0.1", "--port", str(self.engine_ports[index])]
        argv += ["--kvd-socket", str(settings.kvd_socket), "--discovery", settings.server_url]
        environ = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if os.path.isdir(settings.model):
            environ["HF_HUB_OFFLINE"] = "1"
        flags = list(settings.engine_flags)
        if settings.engine_python.is_cpu:
            environ |= cpu_environment(index, settings.engines, flags)
            flags += cpu_flags(flags)
        if not has_flag(flags, DETAILS_FLAG, DETAILS_FLAG.replace("--", "--no-", 1)):
            flags.append(DETAILS_FLAG)  # without it an engine does not say how many tokens were cached
        return self._spawn(f"engine-{index + 1}", argv + flags, environ)

    def _wait_for_engine(self, engine: Child, port: int) -> None:
        """Waits until an engine serves and has joined, looking at every engine meanwhile: another may die first."""

        def is_healthy() -> bool:
            for each in self._engines:
                each.check()
            return get_status(port, "/health") == 200

        engine.wait_ready(is_healthy, limit_s=ENGINE_READY_LIMIT_S, poll_s=ENGINE_POLL_S)
        engine.wait_ready(lambda: port in self.worker_ports(), limit_s=JOIN_LIMIT_S, what="has joined the fleet")

    def _spawn(self, name: str, argv: Sequence[str], extra: dict[str, str]) -> Child:
        assert self._guard is not None
        environ = {**environment_without_infera(), **extra, "PYTHONUNBUFFERED": "1"}
        environ["INFERA_RUNTIME_DIR"] = str(self.settings.runtime_folder)
        for variable in ("INFERA_LOG_LEVEL", "INFERA_JOIN_TOKEN", "INFERA_CACHE_DIR"):
            if variable in os.environ:
                environ[variable] = os.environ[variable]
        log = self.settings.run_folder / f"{name}.log"
        return Child(name, argv, log=log, guard=self._guard, environ=environ)
