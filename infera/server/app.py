"""The application: FastAPI for what people and agents ask, plain ASGI routes for the traffic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from infera.server.admin import admin_router
from infera.server.chat import chat_route
from infera.server.completions import completions_route
from infera.server.errors import ApiError
from infera.server.health import health_router
from infera.server.internal_workers import internal_workers_router
from infera.server.models import models_router
from infera.server.state import ServerState
from infera.server.workers import workers_router


def make_app(state: ServerState) -> FastAPI:
    """The ASGI application of one server. Its lifespan starts and stops ``state``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await state.start()
        try:
            yield
        finally:
            state.is_draining = True
            await state.stop()

    async def check_key(request: Request) -> None:
        if not state.is_authorised(request.headers.get("authorization")):
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key")

    app = FastAPI(title="Infera", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.routes.insert(0, chat_route(state))
    app.router.routes.insert(1, completions_route(state))
    for router in (models_router(state), workers_router(state), admin_router(state)):
        app.include_router(router, dependencies=[Depends(check_key)])
    app.include_router(health_router(state))
    app.include_router(internal_workers_router(state))
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body(), error.status, headers=headers, media_type="application/json")

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return Response(told.body(), told.status, headers=error.headers, media_type="application/json")

    async def validation_error(_: Request, error: Exception) -> Response:
        told = ApiError(400, str(error))
        return Response(told.body(), told.status, media_type="application/json")

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
