"""What the commands that ask a running daemon have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd import protocol
from kvd.client.connection import ClientConnection, UnavailableError
from kvd.options import Values
from kvd.program import default_socket
from kvd.protocol import Message, RefusedError

QUICK_S = 1.0
LONG_S = 10.0
"""Dropping a large namespace takes the daemon a while; a person would rather wait."""


def socket_path(values: Values) -> Path:
    """The socket named, or the one used when none is."""
    return Path(values.socket) if values.socket else default_socket(os.environ)


class Asker:
    """A connection that asks for JSON and gets JSON.

    Raises:
        UnavailableError: when nobody listens there, or no answer comes.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._connection = ClientConnection.open(path, timeout_s)

    def ask(self, message: Message, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request.

        Raises:
            RefusedError: when the daemon refuses, with its words.
            UnavailableError: when it is gone.
        """
        payload = b"" if request is None else protocol.encode_json(request)
        return protocol.decode_json(self._connection.call(message, payload))

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def with_daemon(values: Values, work: Callable[[Asker], int], timeout_s: float = QUICK_S) -> int:
    """Run `work` on a connection; what goes wrong becomes one line and exit status 1."""
    try:
        asker = Asker(socket_path(values), timeout_s)
        try:
            return work(asker)
        finally:
            asker.close()
    except (UnavailableError, RefusedError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
