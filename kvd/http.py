"""`/health`, `/ready` and `/metrics` of the daemon, on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 32

HELP = {
    "data_bytes": "Size of the memory tier.",
    "used_bytes": "Bytes of the memory tier that hold records, finished or not.",
    "present_bytes": "Bytes of complete records.",
    "quarantined_bytes": "Bytes kept back because a live process may still write to them.",
    "records_present": "Complete records.",
    "records_incomplete": "Records some shard of which is still being written.",
    "record_capacity": "Records the index has room for.",
    "reservations": "Shards being written now.",
    "stock_bytes": "Bytes reserved ahead for clients that save.",
    "stock_extents": "Extents reserved ahead for clients that save.",
    "clients": "Client processes.",
    "classes": "Kinds of record (namespace and group).",
    "evicted_total": "Records evicted to make room.",
    "reserve_no_space_total": "Saves refused because everything was pinned or being written.",
    "reserve_limit_total": "Saves refused because the client held too many reservations.",
    "damaged_total": "Records dropped because their bytes did not match their checksum.",
    "events_lost_total": "Events not published because the queue was full.",
    "malformed_frames_total": "Connections closed for bytes that are not the protocol.",
    "refused_peers_total": "Connections refused because the peer is another user.",
}


def render_metrics(values: Mapping[str, int]) -> str:
    """Return the values in the Prometheus text format, prefixed `infera_kvd_`."""
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text = HELP.get(name, name.replace("_", " ").capitalize() + ".")
        lines += [f"# HELP infera_kvd_{name} {text}", f"# TYPE infera_kvd_{name} {kind}", f"infera_kvd_{name} {value}"]
    return "\n".join(lines) + "\n"


class HttpServer:
    """A few read-only pages. Anything but a short GET is refused."""

    def __init__(self, values: Callable[[], Mapping[str, int]], describe: Callable[[], dict[str, object]]) -> None:
        self._values = values
        self._describe = describe
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, port: int) -> int:
        """Listen on 127.0.0.1; returns the port.

        Raises:
            OSError: when the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=REQUEST_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server:
            self._server.close()

    def _page(self, request_line: str) -> tuple[str, str, str]:
        method, _, rest = request_line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return "405 Method Not Allowed", "text/plain", "only GET\n"
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", render_metrics(self._values())
        if path in ("/health", "/ready"):
            return "200 OK", "application/json", json.dumps(self._describe()) + "\n"
        return "404 Not Found", "text/plain", "pages: /health /ready /metrics\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > CONNECTIONS_MAX:
                return
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = self._page(head.split(b"\r\n", 1)[0].decode("latin-1"))
                answer = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n"
                writer.write((answer + "Connection: close\r\n\r\n" + body).encode())
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._open -= 1
            writer.close()
