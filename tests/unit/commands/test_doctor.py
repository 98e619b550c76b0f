"""`infera doctor` says what is there and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from infera.commands import doctor, findings


class Answer(BaseHTTPRequestHandler):
    """Answers with the status of its server."""

    def do_GET(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_is_ready_and_one_without_workers(web: HTTPServer) -> None:
    url = f"http://127.0.0.1:{web.server_port}"
    web.status = 200  # type: ignore[attr-defined]
    assert doctor.server(url).is_good is True
    web.status = 503  # type: ignore[attr-defined]
    finding = doctor.server(url)
    assert finding.is_good is False
    assert "no worker has joined" in finding.detail


def test_no_server_is_a_fact_with_a_cure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        finding = doctor.server(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert finding.is_good is None
    assert "infera up" in finding.detail


def test_kvd(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert findings.ask_kvd(None).is_good is None
    assert findings.ask_kvd(str(path)).is_good is False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        assert findings.ask_kvd(str(path)).is_good is True


def test_the_report_and_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--kvd-socket", str(tmp_path / "none")]) == 1
    text = capsys.readouterr().out
    assert "FAIL kvd" in text
    assert "ok   C core" in text
