"""/v1/admin: the server explains itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from infera.server.errors import ApiError
from infera.server.state import ServerState


def admin_router(state: ServerState) -> APIRouter:
    """Why a request went where it went."""
    router = APIRouter(tags=["admin"])

    @router.get("/v1/admin/why/{request_id:path}")
    async def why(request_id: str) -> dict[str, Any]:
        story = state.decisions.get(request_id)
        if story is None:
            raise ApiError(
                404, f"request {request_id!r} is not among the last ones; ids are in the X-Request-Id response header"
            )
        return {"request_id": request_id, **story.explain()}

    return router
