"""/internal/v1/workers: where agents register, renew and deregister (embedded discovery)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from infera.discovery.embedded import EndedIncarnationError, RegistryFullError, TokenizerConflictError
from infera.discovery.record import RECORD_BYTES_MAX, RecordError, decode_record
from infera.server.errors import ApiError, no_worker
from infera.server.state import ServerState, bearer_matches


def internal_workers_router(state: ServerState) -> APIRouter:
    """Registration and heartbeat are the same call: a full record."""
    router = APIRouter(tags=["internal"])

    @router.put("/internal/v1/workers/{incarnation}")
    async def put_worker(incarnation: str, request: Request) -> dict[str, Any]:
        _check_token(state, request)
        body = await _read(request)
        try:
            record = decode_record(body)
            if record.incarnation != incarnation:
                raise RecordError("the incarnation in the path and in the record differ")
            known = state.registry.put(record)
        except RecordError as error:
            raise ApiError(400, str(error), code="bad_record") from error
        except (TokenizerConflictError, EndedIncarnationError) as error:
            raise ApiError(409, str(error), kind="conflict_error", code="conflict") from error
        except RegistryFullError as error:
            raise no_worker(str(error)) from error
        return {
            "lease_ttl_s": state.registry.lease_ttl_s,
            "server_instance": state.registry.instance,
            "known": known,
        }

    @router.delete("/internal/v1/workers/{incarnation}")
    async def delete_worker(incarnation: str, request: Request) -> dict[str, Any]:
        _check_token(state, request)
        return {"known": state.registry.delete(incarnation)}

    return router


def _check_token(state: ServerState, request: Request) -> None:
    token = state.config.join_token
    if token is None and state.config.is_loopback:
        return
    if token is None:
        raise ApiError(
            401, "this server listens off loopback and has no --join-token, so no worker can join", code="join_token"
        )
    if not bearer_matches(request.headers.get("authorization"), token):
        raise ApiError(
            401, "wrong or missing join token: give the worker the server's INFERA_JOIN_TOKEN", code="join_token"
        )


async def _read(request: Request) -> bytes:
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > RECORD_BYTES_MAX:
            raise ApiError(413, f"a worker record may have {RECORD_BYTES_MAX} bytes at most", code="request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)
