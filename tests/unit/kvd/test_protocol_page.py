"""docs/kvd-protocol.md says what is so: its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from infera_core import lib

from kvd import protocol, replay
from kvd.client.connection import DESCRIPTORS_EXPECTED
from kvd.protocol import Kind, Message

PAGE = (Path(__file__).parents[3] / "docs" / "kvd-protocol.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    body = PAGE.split(f"\n{head}\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def test_the_messages() -> None:
    assert {int(row[0]): row[1] for row in rows("| number | name | request | answer |")} == {m: m.name for m in Message}


def test_the_statuses() -> None:
    for number, name, _ in rows("| number | name | what it means for a save |"):
        assert getattr(lib, f"STORE_{name}") == int(number)


def test_the_packed_arrays() -> None:
    structs = {
        "RESERVE head": protocol.RESERVE_HEAD,
        "wish": protocol.WISH,
        "grant": protocol.GRANT,
        "commitment": protocol.COMMITMENT,
        "status": protocol.STATUS_CODE,
    }
    widths = {"u16": "H", "u32": "I", "u64": "Q", "16": "16s"}
    found = {what: (int(size), fields) for what, size, fields in rows("| what | bytes | fields |")}
    assert set(found) == set(structs)
    for what, (size, fields) in found.items():
        assert structs[what].size == size
        words = [widths[field.split()[0]] for field in re.sub(r"\(.*?\)", "", fields).split(",")]
        assert structs[what].format == "<" + "".join(words)


def test_the_header_and_the_limits() -> None:
    assert [int(row[0]) for row in rows("| offset | bytes | field |")] == [0, 4, 6, 8, 12]
    assert sum(int(row[1]) for row in rows("| offset | bytes | field |")) == protocol.HEADER.size
    assert f"at most {protocol.FRAME_BYTES_MAX:,}" in PAGE
    assert "kind: 0 request, 1 answer, 2 error" in PAGE
    assert [Kind.REQUEST, Kind.ANSWER, Kind.ERROR] == [0, 1, 2]
    limits = {row[0]: row[1] for row in rows("| what | limit | at the limit |")}
    assert limits["entries of RESERVE, COMMIT, GIVE_UP, TOUCH"] == f"{protocol.BATCH_MAX:,}"
    assert limits["records of VERIFY"] == str(protocol.VERIFY_BATCH_MAX)
    assert limits["records of a LIST answer"] == f"{protocol.LIST_RECORDS_MAX:,}"
    assert limits["reservations of a client"] == f"{lib.STORE_RESERVATIONS_PER_CLIENT_MAX:,}"
    assert limits["client processes"] == str(lib.STORE_CLIENTS_MAX)
    assert limits["connections"] == str(lib.LOOP_CONNECTIONS_MAX)
    assert limits["unsent answers of a connection"] == f"{lib.LOOP_UNSENT_BYTES_MAX >> 20} MiB"
    assert limits["payload of a JSON message of an engine"] == f"{lib.LOOP_CONTROL_BYTES_MAX >> 10} KiB"
    assert f"this page is version {protocol.PROTOCOL_VERSION}" in PAGE
    assert len(re.findall(r"^\d\. ", PAGE, re.M)) == DESCRIPTORS_EXPECTED
    assert f"last {replay.REPLAY_FRAMES_MAX:,} frames" in PAGE
    assert f"exceed {replay.REPLAY_BYTES_MAX >> 20} MiB" in PAGE
