"""GET /v1/workers: the fleet as this server sees it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter

from infera.discovery.record import without_load
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
    loads = [state.core.loads.of(place.key) for place in worker.places]
    now_s = time.monotonic()
    entry: dict[str, Any] = {
        "worker_id": record.worker_id,
        "state": worker.state,
        "failures": worker.failures,
        "load": {
            "active_requests": sum(load.active_requests for load in loads),
            "queued_prefill_tokens": round(sum(load.queued_prefill_tokens for load in loads)),
            "context_tokens": sum(load.context_tokens for load in loads),
        },
        "speed": [
            {
                "dp_rank": place.dp_rank,
                "prefill_tokens_per_s": round(1 / state.core.speeds.s_per_token(place, now_s)),
                "factor": round(state.core.speeds.factor(place.key, now_s), 3),
            }
            for place in worker.places
        ],
        "reported": [
            msgspec.to_builtins(load) for place in worker.places if (load := state.core.reports.last(place.key))
        ],
        "cached_blocks": state.cache.blocks_by_tier(record),
        "record": msgspec.to_builtins(without_load(record)),
    }
    if worker.is_suspect:
        entry["suspect_reason"] = worker.suspect_reason
    return entry
