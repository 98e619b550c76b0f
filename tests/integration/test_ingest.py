"""The ingest process beside real servers and engines: it dies, it is shared, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.ingest_link import IngestLink, try_to_connect
from tests.support.processes import Cluster, call, wait_until
from tests.support.records import record

pytestmark = pytest.mark.integration


def chat(number: int) -> dict[str, Any]:
    """A conversation of its own."""
    text = f"conversation {number}: " + "many words that are the same " * 30
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def blocks(fleet: Cluster, worker: str) -> int:
    """Blocks the server sees in a worker's memory; -1 for a worker it does not know."""
    for entry in call(f"{fleet.url}/v1/workers").json["data"]:
        if entry["worker_id"] == worker:
            return int(entry["cached_blocks"].get("hbm", 0))
    return -1


def ingest_processes(parent: int) -> list[int]:
    """Ingest processes that a server started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if b"infera.cachemap.ingest" in words and int(status[1]) == parent and status[0] != "Z":
            found.append(int(entry.name))
    return found


def test_when_the_ingest_process_dies_the_map_is_built_again(fleet: Cluster) -> None:
    server = fleet.start_server()
    fleet.start_engine("--worker-id", "a")
    assert call(f"{fleet.url}/v1/chat/completions", chat(1)).status == 200
    wait_until(lambda: blocks(fleet, "a") > 0, "the events arrived")
    held = blocks(fleet, "a")
    (pid,) = ingest_processes(server.popen.pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: blocks(fleet, "a") == 0, "the death was noticed")
    assert call(f"{fleet.url}/v1/chat/completions", chat(2)).status == 200, "requests are served meanwhile"
    wait_until(lambda: blocks(fleet, "a") > held, "the map was built again from replays")
    assert ingest_processes(server.popen.pid) != [pid]
    assert call(f"{fleet.url}/ready").status == 200


def test_an_ingest_process_that_does_not_come_up_is_said(fleet: Cluster) -> None:
    server = fleet.start_server()
    wait_until(lambda: len(ingest_processes(server.popen.pid)) == 1, "it runs")
    (pid,) = ingest_processes(server.popen.pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _is_said(fleet), "/ready names it")
    wait_until(lambda: not _is_said(fleet), "and no more once it is back")


def _is_said(fleet: Cluster) -> bool:
    return any("ingest process is down" in line for line in call(f"{fleet.url}/ready").json["degraded"])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_ingest_process_outlives_its_server(fleet: Cluster, how: signal.Signals) -> None:
    server = fleet.start_server()
    wait_until(lambda: len(ingest_processes(server.popen.pid)) == 1, "it runs")
    (pid,) = ingest_processes(server.popen.pid)
    server.stop(how)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")


async def test_a_second_server_reads_the_same_map_and_predictions_are_shared() -> None:
    name = secrets.token_hex(8)
    links = [IngestLink(name=name) for _ in range(2)]
    caches = [FleetCache(link) for link in links]
    try:
        worker = record(1)
        for cache in caches:
            await cache.start()
            cache.add_worker(worker)
        async with asyncio.timeout(30):
            while not all(cache.target(worker, 0) for cache in caches):
                await asyncio.sleep(0.02)
            keys = chain_keys(root_key(), list(range(64)))
            caches[0].predict(worker, 0, keys)
            target = caches[1].target(worker, 0)
            assert target is not None
            while caches[1].match(keys, [target])[0].total_tokens != 64:
                await asyncio.sleep(0.02)
            caches[0].remove_worker(worker)
            assert caches[0].target(worker, 0) is None
            assert caches[1].target(worker, 0) == target, "the other still follows it"
            await caches[0].close()
            assert caches[1].target(worker, 0) == target, "it does not end with one of them"
    finally:
        for cache in caches:
            await cache.close()
    wait_until(lambda: try_to_connect(f"{os.getuid()}-{name}") is None, "it ends with the last")
