"""The little HTTP a supervisor needs, with the standard library only. Loopback, bounded in time and size."""

from __future__ import annotations

import http.client
import json
from typing import Any

PROBE_LIMIT_S = 5.0
BODY_BYTES_MAX = 4 * 2**20


def get_status(port: int, path: str) -> int | None:
    """The status that a local server answers with; None when it does not answer."""
    answer = _get(port, path)
    return answer[0] if answer else None


def get_json(port: int, path: str) -> Any:
    """The JSON that a local server answers with 200; None when it answers otherwise or not at all."""
    answer = _get(port, path)
    if answer is None or answer[0] != 200:
        return None
    try:
        return json.loads(answer[1])
    except ValueError:
        return None


def _get(port: int, path: str) -> tuple[int, bytes] | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_LIMIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(BODY_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
