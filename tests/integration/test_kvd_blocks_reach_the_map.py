"""The real cache daemon's records in the router's map."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.interface import Tier
from infera.discovery.record import KvdSource
from kvd.client.client import KvdClient, RecordSpec
from kvd.client.connection import ClientConnection, UnavailableError
from tests.support.records import record

pytestmark = pytest.mark.integration
TOKENS = list(range(128))
CHAIN = chain_keys(root_key(), TOKENS)
NAMESPACE = b"\x07" * 16


@pytest.fixture
def daemon() -> Iterator[Path]:
    """A running daemon's socket."""
    with TemporaryDirectory(prefix="infera-") as folder:
        socket = Path(folder) / "kvd.sock"
        flags = ["--socket", str(socket), "--memory", "16M", "--path", folder, "--http-port", "0", "--no-prefault"]
        process = subprocess.Popen([sys.executable, "-m", "kvd", "serve", *flags])
        try:
            yield socket
        finally:
            process.terminate()
            process.wait(20)


async def _describe(socket: Path) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            try:
                connection = ClientConnection.open(socket)
            except (OSError, UnavailableError):
                await asyncio.sleep(0.05)
                continue
            try:
                return dict(connection.observe())
            finally:
                connection.close()


async def test_records_saved_by_a_client_are_matched_for_its_worker(daemon: Path) -> None:
    seen = await _describe(daemon)
    spec = RecordSpec(namespace=NAMESPACE, group=0, shard_bytes=(4096,), model="m")
    client = KvdClient(daemon, "test", [spec])
    client.start()
    cache = FleetCache()
    source = KvdSource(instance=seen["instance"], namespace=NAMESPACE.hex(), pub=seen["pub"], snapshot=seen["snapshot"])
    worker = record(1, events=None, kvd=source, block_size_tokens=32)
    try:
        async with asyncio.timeout(20):
            while client.session() is None:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(_save, client, spec, [CHAIN[16:32], CHAIN[48:64]])
            cache.add_worker(worker)
            target = cache.target(worker, 0)
            assert target is not None
            while cache.match(CHAIN, [target])[0].tokens_by_tier != {Tier.RAM: 64}:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(_save, client, spec, [CHAIN[80:96]])
            while cache.match(CHAIN, [target])[0].tokens_by_tier != {Tier.RAM: 96}:
                await asyncio.sleep(0.02)
        assert cache.blocks_by_tier(worker) == {"ram": 3}
    finally:
        client.close()
        await cache.close()


def _save(client: KvdClient, spec: RecordSpec, keys: list[bytes]) -> None:
    grants = client.reserve(spec, 0, keys, [2 * (number + 1) for number in range(len(keys))])
    assert len(grants) == len(keys)
    assert client.commit(grants, [0] * len(grants)) == len(keys)
