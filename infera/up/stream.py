"""One streaming completion, measured: what a client sees, with the standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infera.tools.errors import ToolError

ANSWER_LIMIT_S = 300.0
LINE_BYTES_MAX = 1 << 20
LINES_MAX = 100_000
WORKER_HEADER = "X-Infera-Worker"


@dataclass(frozen=True)
class Measured:
    """One answer. `cached_tokens` is what the engine reports, None when it reports nothing."""

    worker_id: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    text: str


def stream_chat(
    port: int, model: str, messages: list[dict[str, str]], *, max_tokens: int, worker_id: str | None = None
) -> Measured:
    """Sends one greedy chat completion to a local server and reads it to the end.

    `worker_id` forces a worker. Raises ToolError when the answer is not a complete stream.
    """
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    if worker_id is not None:
        headers[WORKER_HEADER] = worker_id
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    try:
        return _exchange(connection, json.dumps(body), headers)
    except (OSError, http.client.HTTPException) as error:
        raise ToolError(f"the request to port {port} failed: {type(error).__name__} {error}") from error
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, body: str, headers: Mapping[str, str]) -> Measured:
    connection.connect()  # so that the time is the server's, not the network's
    started_s = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body, dict(headers))
    response = connection.getresponse()
    if response.status != 200:
        raise ToolError(f"the server answered {response.status}: {response.read(2000).decode(errors='replace')}")
    ttft_s: float | None = None
    text, usage = "", None
    for chunk in _chunks(response):
        delta = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
        if delta and ttft_s is None:
            ttft_s = time.monotonic() - started_s
        text += delta
        usage = chunk.get("usage") or usage
    if ttft_s is None or usage is None:
        raise ToolError(f"the stream ended without {'text' if ttft_s is None else 'usage'}; text so far: {text!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Measured(
        worker_id=response.getheader(WORKER_HEADER) or "",
        ttft_s=ttft_s,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens"),
        text=text,
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises ToolError on an error event and when the end mark is missing."""
    for _ in range(LINES_MAX):
        line = response.readline(LINE_BYTES_MAX)
        if not line:
            break
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise ToolError(f"the stream ended with an error: {chunk['error']}")
        yield chunk
    raise ToolError("the stream ended without [DONE]")
