"""What the fleet is told of an engine's adapters, as they are loaded, replaced and taken away."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from infera.discovery.record import ADAPTERS_MAX, check_record
from infera.engine.adapter_watch import UNKNOWN, AdapterWatch
from tests.support.records import record
from tests.unit.engine.test_adapters import digest, make


def told(watch: AdapterWatch, listed: dict[str, str]) -> dict[str, str]:
    """What is told once the files have been read; a record always takes it."""
    watch.digests(listed)
    watch.wait(10)
    found = watch.digests(listed)
    check_record(record(adapters=found))
    return found


def test_an_adapter_is_told_before_its_content_is_known(tmp_path: Path) -> None:
    watch, folder = AdapterWatch(), make(tmp_path / "a")
    assert watch.digests({"sql": str(folder)}) == {"sql": UNKNOWN}
    watch.wait(10)
    assert watch.digests({"sql": str(folder)}) == {"sql": digest(folder).hex()}


def test_adapters_come_go_and_change_under_their_names(tmp_path: Path) -> None:
    watch = AdapterWatch()
    first, second = make(tmp_path / "a"), make(tmp_path / "b", b"second")
    assert told(watch, {}) == {}
    assert told(watch, {"sql": str(first)}) == {"sql": digest(first).hex()}
    assert told(watch, {"sql": str(second), "law": str(first)}) == {
        "sql": digest(second).hex(), "law": digest(first).hex(),
    }  # fmt: skip
    make(second, b"third weights")
    assert told(watch, {"sql": str(second)}) == {"sql": digest(second).hex()}


def test_content_that_cannot_be_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = AdapterWatch()
    listed = {"hub": "somebody/their-adapter", "none": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert told(watch, listed) == told(watch, listed) == {"hub": UNKNOWN, "none": UNKNOWN}
    assert [("hub" in line, "not followed" in line) for line in caplog.messages] == [(True, True), (False, True)]
    caplog.clear()
    told(watch, {})
    with caplog.at_level(logging.WARNING):
        told(watch, listed)
    assert len(caplog.messages) == 2, "it was taken away and is there again"


def test_what_a_record_cannot_hold_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = AdapterWatch()
    with caplog.at_level(logging.WARNING):
        odd = {"": "x", "n" * 600: "x", "line\nline": "x", "good": str(make(tmp_path / "a"))}
        assert list(told(watch, odd)) == ["good"]
        assert len(told(watch, {f"n{number}": str(tmp_path / "a") for number in range(1000)})) == ADAPTERS_MAX
        assert 0 < len(told(watch, {f"{number:0500}": str(tmp_path / "a") for number in range(200)})) < 40
    assert sum("the fleet is told of the first" in line for line in caplog.messages) == 2
