"""GET /v1/workers: the fleet as this server sees it."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from infera.router.fleet import FleetWorker
from infera.server.state import ServerState


def workers_router(state: ServerState) -> APIRouter:
    """Records, states, loads and cached blocks."""
    router = APIRouter(tags=["fleet"])

    @router.get("/v1/workers")
    async def list_workers() -> dict[str, Any]:
        workers = sorted(state.fleet.workers.values(), key=lambda worker: worker.record.worker_id)
        return {"object": "list", "data": [_entry(state, worker) for worker in workers]}

    return router


def _entry(state: ServerState, worker: FleetWorker) -> dict[str, Any]:
    record = worker.record
    ranks = [rank.dp_rank for rank in record.events.ranks] if record.events else [0]
    loads = [state.core.loads.of(record.incarnation, rank) for rank in ranks]
    entry: dict[str, Any] = {
        "worker_id": record.worker_id,
        "state": worker.state,
        "failures": worker.failures,
        "load": {
            "active_requests": sum(load.active_requests for load in loads),
            "queued_prefill_tokens": round(sum(load.queued_prefill_tokens() for load in loads)),
            "decode_context_tokens": sum(load.decode_context_tokens() for load in loads),
        },
        "cached_blocks": state.cache.blocks_by_tier(record),
        "record": msgspec.to_builtins(record),
    }
    if worker.is_suspect:
        entry["suspect_reason"] = worker.suspect_reason
    return entry
