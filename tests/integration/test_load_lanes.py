"""Servers of one host share an ingest process, and through it what they have under way."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable

import pytest

from infera.cachemap.ingest_link import IngestLink
from infera.cachemap.load_table import PlaceSum

pytestmark = pytest.mark.integration
WAIT_S_MAX = 30.0


async def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.02)


async def test_what_one_server_has_under_way_another_sees_until_it_is_gone() -> None:
    name = secrets.token_hex(8)
    ingest = await asyncio.create_subprocess_exec(sys.executable, "-m", "infera.cachemap.ingest", "--name", name)
    one, other = IngestLink(name=name), IngestLink(name=name)
    try:
        for link in (one, other):
            await link.start()
        await until(lambda: one.load_lane and other.load_lane, "both have a lane")
        assert one.load_lane
        assert other.load_lane
        assert one.load_lane.number != other.load_lane.number
        now_s = time.monotonic()
        one.load_lane.beat(now_s)
        one.load_lane.put(7, PlaceSum(100, 1, 100), 100, now_s)
        assert other.load_lane.others([7], [0.0], now_s) == [PlaceSum(100, 1, 100)]
        await one.close()
        assert one.load_lane is None
        watcher = other.load_lane
        await until(lambda: watcher.others([7], [0.0], now_s) == [PlaceSum(0, 0, 0)], "its lane is emptied")
    finally:
        await one.close()
        await other.close()
        if ingest.returncode is None:
            ingest.terminate()
        await ingest.wait()


async def test_a_new_ingest_process_brings_a_new_lane() -> None:
    link = IngestLink()
    try:
        await link.start()
        await until(lambda: link.load_lane, "a lane")
        first = link.load_lane
        assert link._process is not None
        link._process.kill()
        await until(lambda: link.load_lane not in (None, first), "another lane")
    finally:
        await link.close()
