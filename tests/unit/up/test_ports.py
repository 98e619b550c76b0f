"""Free and reserved ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from infera.tools.errors import ToolError
from infera.up.ports import PortReservations, require_free_port

FIRST = 20100


@pytest.fixture
def reservations(tmp_path: Path) -> Iterator[PortReservations]:
    reservations = PortReservations(tmp_path)
    yield reservations
    reservations.close()


def test_a_taken_port_is_refused_with_the_cure() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(ToolError, match=f"port {port} on 127.0.0.1 is taken.*--port"):
            require_free_port(port)
    require_free_port(port)


def test_taken_ports_are_passed_over(reservations: PortReservations, tmp_path: Path) -> None:
    (port,) = reservations.reserve(1, first=FIRST)
    reservations.close()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as engines listen
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
        assert port not in reservations.reserve(2, first=FIRST)


def test_two_fleets_that_start_at_once_get_different_ports(reservations: PortReservations, tmp_path: Path) -> None:
    other = PortReservations(tmp_path)
    mine, theirs = reservations.reserve(2, first=FIRST), other.reserve(2, first=FIRST)
    assert not set(mine) & set(theirs)
    with pytest.raises(ToolError, match="another fleet is starting"):
        other.reserve_exactly(mine[0])
    reservations.close()
    other.reserve_exactly(mine[0])
    other.close()


def test_the_search_has_an_end(reservations: PortReservations) -> None:
    with pytest.raises(ToolError, match="fewer than"):
        reservations.reserve(401, first=FIRST)
