"""GET /v1/models"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from infera.server.errors import ApiError
from infera.server.state import ServerState


def models_router(state: ServerState) -> APIRouter:
    """The names that can be asked for: models, their aliases and their LoRA adapters."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_entry(state, name) for name in sorted(state.fleet.models())]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        if name not in state.fleet.models():
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return _entry(state, name)

    return router


def _entry(state: ServerState, name: str) -> dict[str, Any]:
    record = state.fleet.models()[name]
    entry = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "infera",
        "root": record.model,
        "max_model_len": record.max_context_tokens,
    }
    # As engines list adapters: with the model they are laid over.
    return entry if name in (record.model, *record.aliases) else entry | {"parent": record.model}
