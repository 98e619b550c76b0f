"""Servers of one host share an ingest process, and through it what they have under way."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from infera.cachemap.ingest_link import IngestLink
from infera.cachemap.load_table import PlaceSum
from tests.support.processes import Cluster, Process, call, control, wait_until

pytestmark = pytest.mark.integration
WAIT_S_MAX = 30.0


async def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.02)


async def test_what_one_server_has_under_way_another_sees_until_it_is_gone() -> None:
    name = secrets.token_hex(8)
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


def test_servers_of_one_host_share_a_map_and_see_each_others_load(fleet: Cluster) -> None:
    name = secrets.token_hex(8)
    first = fleet.start_server("--shared-map", name)
    second = fleet.start_server("--shared-map", name)
    engine = fleet.start_engine("--worker-id", "a", "--server", f"{first.url},{second.url}", joins=False)
    wait_until(lambda: all(knows_blocks(server, 0) for server in (first, second)), "both know the engine")
    control(engine, delay_s=2.0)
    body = {"model": "m", "prompt": list(range(600)), "max_tokens": 1, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, f"{first.url}/v1/completions", body)
        wait_until(lambda: shared(second) == 1, "the other server sees the request")
        assert answer.result().status == 200
    wait_until(lambda: shared(second) == 0, "and that it is over")
    first.stop()
    assert knows_blocks(second, 1), "what was stored before is still known"


def knows_blocks(server: Process, blocks: int) -> bool:
    """Whether a server knows the engine, and at least so many blocks of it."""
    workers = call(f"{server.url}/v1/workers").json["data"]
    return bool(workers) and workers[0]["cached_blocks"].get("hbm", 0) >= blocks


def shared(server: Process) -> float:
    """Requests that other servers of the host have under way, as a server sees them."""
    for line in call(f"{server.url}/metrics").body.decode().splitlines():
        if line.startswith("infera_router_shared_requests "):
            return float(line.rpartition(" ")[2])
    return -1.0


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
