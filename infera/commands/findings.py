"""What the doctor found, a line each, and how it is printed."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

CONNECT_LIMIT_S = 2.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. `is_good` is None for a plain fact."""

    what: str
    is_good: bool | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def print_findings(findings: Iterable[Finding]) -> None:
    """One line each, good and bad marked."""
    for finding in findings:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.is_good]
        print(f"{mark} {finding.what:<20} {finding.detail}")


def ask_kvd(socket_path: str | None) -> Finding:
    """Whether the cache daemon accepts a connection."""
    if not socket_path:
        return Finding("kvd", None, "not asked; name its socket with --kvd-socket or INFERA_KVD_SOCKET")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_LIMIT_S)
            probe.connect(socket_path)
    except OSError as error:
        return Finding("kvd", False, f"{socket_path}: {error}; start it: infera-kvd serve --socket {socket_path}")
    return Finding("kvd", True, f"answers on {socket_path}")
