"""SIGKILL and start again on the same files, with a million records."""

from __future__ import annotations

import os
from pathlib import Path

from infera_core import ffi, lib

from infera.tools.bench.kvd.daemon import BenchDaemon
from kvd import protocol
from kvd.client.connection import ClientConnection
from kvd.protocol import Message

RECORDS = 1_000_000
RECORD_BYTES = 4096
BATCH = 8192
INDEX_RECORDS = 1 << 21
FLAGS = ("--memory", f"{RECORDS * RECORD_BYTES * 9 // 8}", "--records", str(INDEX_RECORDS), "--no-prefault")
SPEC = {"namespace": "d0" * 16, "group": 0, "model": "bench", "shard_bytes": [RECORD_BYTES]}


def measure_restart(rounds: int) -> tuple[list[float], int]:
    """Seconds from the start of the process to its first answer, one sample a round; and records lost, at worst."""
    samples, lost = [], 0
    with BenchDaemon(*FLAGS) as daemon:
        _fill(daemon.socket)
        before = int(daemon.status()["metrics"]["records_present"])
        for _ in range(rounds):
            daemon.kill()
            samples.append(daemon.start())
            lost = max(lost, before - int(daemon.status()["metrics"]["records_present"]))
        if before < RECORDS:
            raise RuntimeError(f"only {before} records could be stored")
    return samples, lost


def _fill(socket_path: Path) -> None:
    """Store a million records of zeroes, which is what a fresh arena holds already."""
    connection = ClientConnection.open(socket_path, 30.0)
    _, descriptors = connection.hello("bench-fill")
    for descriptor in descriptors:
        os.close(descriptor)
    class_id = protocol.decode_json(connection.call(Message.OPEN, protocol.encode_json(SPEC)))["class_id"]
    head = protocol.RESERVE_HEAD.pack(class_id, 0, lib.STORE_RETAIN_SHORT, 0, 0, 0)
    checksum = int(lib.checksum_bytes(ffi.from_buffer(bytes(RECORD_BYTES)), RECORD_BYTES))
    for first in range(0, RECORDS, BATCH):
        count = min(BATCH, RECORDS - first)
        wishes = b"".join(protocol.WISH.pack((first + i).to_bytes(16, "little"), 1, 0) for i in range(count))
        grants = connection.call(Message.RESERVE, head + wishes)
        entries = [protocol.COMMITMENT.pack(grant[0], checksum) for grant in protocol.GRANT.iter_unpack(grants)]
        connection.call(Message.COMMIT, b"".join(entries))
    connection.close()
