"""GET /health (alive), /ready (can serve) and /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from infera.server.errors import RETRY_AFTER_S
from infera.server.state import ServerState


def health_router(state: ServerState) -> APIRouter:
    """What probes and scrapers ask; no key needed."""
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        missing = state.missing()
        content: dict[str, Any] = {
            "ready": not missing,
            "missing": missing,
            "degraded": state.degraded(),
            "workers": len(state.fleet.workers),
            "models": sorted(state.fleet.models()),
            "router_policy": state.core.policy.name,
        }
        if missing:
            return JSONResponse(content, 503, headers={"Retry-After": str(RETRY_AFTER_S)})
        return JSONResponse(content)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render_text(), media_type=CONTENT_TYPE_LATEST)

    return router
