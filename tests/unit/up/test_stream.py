"""The measuring client, against a real HTTP server that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from infera.tools.errors import ToolError
from infera.up.stream import stream_chat

MESSAGES = [{"role": "user", "content": "Hi"}]


class Scripted(BaseHTTPRequestHandler):
    """Answers with the status and body of its server, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        server.seen_headers = dict(self.headers)
        server.seen_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(server.status)
        self.send_header("X-Infera-Worker", "vllm-a")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in server.pieces:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Scripted)
    server.status = 200
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


USAGE = event(choices=[], usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}})
DONE = b"data: [DONE]\n\n"


def test_a_complete_stream(web: Any) -> None:
    first = delta("Par")
    web.pieces = [event(choices=[{"delta": {"role": "assistant"}}]), first[:7], first[7:], delta("is"), USAGE, DONE]
    measured = stream_chat(web.server_port, "m", MESSAGES, max_tokens=4, worker_id="vllm-b")
    assert (measured.text, measured.prompt_tokens, measured.cached_tokens) == ("Paris", 9, 4)
    assert measured.worker_id == "vllm-a"
    assert measured.ttft_s > 0
    assert web.seen_headers["X-Infera-Worker"] == "vllm-b"
    assert web.seen_body["temperature"] == 0
    assert web.seen_body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([delta("Paris"), USAGE], r"without \[DONE\]"),
        ([delta("Paris"), DONE], "without usage"),
        ([USAGE, DONE], "without text"),
        ([event(error={"message": "engine died"})], "engine died"),
    ],
)
def test_an_incomplete_stream_is_an_error(web: Any, pieces: list[bytes], words: str) -> None:
    web.pieces = pieces
    with pytest.raises(ToolError, match=words):
        stream_chat(web.server_port, "m", MESSAGES, max_tokens=4)


def test_an_error_status_shows_the_reason(web: Any) -> None:
    web.status, web.pieces = 503, [b"no worker serves m"]
    with pytest.raises(ToolError, match="503: no worker serves m"):
        stream_chat(web.server_port, "m", MESSAGES, max_tokens=4)
