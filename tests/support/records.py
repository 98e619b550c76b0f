"""Worker records for tests."""

from __future__ import annotations

from typing import Any

from infera.discovery.record import EventRank, EventSource, WorkerRecord


def record(number: int = 1, **fields: Any) -> WorkerRecord:
    """A well-formed record; ``number`` makes it a worker of its own."""
    incarnation = f"{number:032x}"
    base: dict[str, Any] = {
        "incarnation": incarnation,
        "worker_id": f"worker-{number}",
        "url": f"http://127.0.0.1:{9000 + number}",
        "engine": "fake",
        "engine_version": "1",
        "model": "m",
        "block_size_tokens": 16,
        "events": EventSource(topic=f"kv@{incarnation}", ranks=(EventRank(dp_rank=0, pub="ipc:///x"),)),
    }
    return WorkerRecord(**(base | fields))
