"""Errors in the shape of the API that was called."""

from __future__ import annotations

from typing import Any, Final

import msgspec

RETRY_AFTER_S: Final = 2
_ENCODER: Final = msgspec.json.Encoder()


class ApiError(Exception):
    """An answer that is an error: HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.message, kind=self.kind, code=self.code, param=self.param)


def error_body(message: str, *, kind: str, code: str | int | None = None, param: str | None = None) -> bytes:
    """OpenAI's error object as JSON."""
    content: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return _ENCODER.encode(content)


def busy(message: str, *, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """429: the server has all the work it accepts."""
    return ApiError(429, message, kind="rate_limit_error", code="server_busy", headers=_retry_after(retry_after_s))


def no_worker(message: str) -> ApiError:
    """503: nobody can serve this now."""
    return ApiError(503, message, kind="service_unavailable_error", code="no_worker", headers=_retry_after())


def _retry_after(after_s: int = RETRY_AFTER_S) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(after_s).encode()),)
