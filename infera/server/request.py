"""A client's request, read as far as routing needs it. The body itself goes on as the bytes that came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from infera.server.errors import ApiError

_DECODER: Final = msgspec.json.Decoder()
_USAGE_OPTION: Final = b'"stream_options":{"include_usage":true},'
# A model's name ends up in messages and metrics.
MODEL_CHARACTERS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A chat or text completion request."""

    model: str
    fields: dict[str, Any]
    raw_body: bytes
    is_streaming: bool
    adds_usage: bool

    @property
    def engine_body(self) -> bytes:
        """What the engine gets: the client's bytes, with the usage option put in front where we asked for it."""
        if not self.adds_usage:
            return self.raw_body
        start = self.raw_body.index(b"{") + 1
        return self.raw_body[:start] + _USAGE_OPTION + self.raw_body[start:]


def parse_generation_request(body: bytes) -> GenerationRequest:
    """Read a request. Raises ApiError with what is wrong."""
    try:
        fields = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the request body must be a JSON object, not {_kind(fields)}", code="invalid_json")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError(400, "model must be a string", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(400, "stream must be true or false", param="stream")
    return GenerationRequest(
        model=(model or "")[:MODEL_CHARACTERS_MAX],
        fields=fields,
        raw_body=body,
        is_streaming=bool(stream),
        adds_usage=bool(stream) and "stream_options" not in fields,
    )


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
