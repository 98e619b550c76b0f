"""TCP ports on the loopback interface: whether one is free, and ports kept for one fleet.

Looking is not enough: two fleets that start at once would both find the same port free, and because engines listen with
SO_REUSEPORT both would get it, each answering some of the other's requests. So a port is reserved by a lock, which
every fleet of this user respects and the kernel frees with its owner.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

from infera.tools.errors import ToolError

ENGINE_PORT_FIRST = 8101
PORTS_TRIED_MAX = 400


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether we could listen on a port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do, so that a connection of a former run that is still closing does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free_port(port: int, host: str = "127.0.0.1") -> None:
    """Raises ToolError, naming the cure, when something listens on the port."""
    if not is_port_free(port, host):
        raise ToolError(
            f"port {port} on {host} is taken; see by whom: ss -ltnp 'sport = :{port}'; "
            "stop that program, or choose another port with --port"
        )


def default_lock_folder() -> Path:
    """The same for every fleet of this user, whatever its other folders are."""
    return Path(tempfile.gettempdir()) / f"infera-ports-{os.getuid()}"


class PortReservations:
    """Ports that no other fleet of this user takes until `close`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_lock_folder()
        self._locks: dict[int, int] = {}

    def reserve(self, count: int, first: int = ENGINE_PORT_FIRST) -> list[int]:
        """The first ports from `first` on that are free and not reserved. Raises ToolError when there are too few."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports: list[int] = []
        for port in range(first, first + PORTS_TRIED_MAX):
            if len(ports) == count:
                break
            if self._try(port):
                ports.append(port)
        if len(ports) < count:
            last = first + PORTS_TRIED_MAX - 1
            raise ToolError(f"fewer than {count} free ports from {first} to {last}; end some programs")
        return ports

    def reserve_exactly(self, port: int) -> None:
        """Reserves one port. Raises ToolError when it is taken, or another fleet has it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_free_port(port)
        if not self._try(port):
            raise ToolError(f"another fleet is starting on port {port}; wait for it, or choose another with --port")

    def close(self) -> None:
        """Frees all of them."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def _try(self, port: int) -> bool:
        if port in self._locks:
            return False
        descriptor = os.open(self._folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if not is_port_free(port):
            os.close(descriptor)
            return False
        self._locks[port] = descriptor
        return True
