"""vLLM's KV event frames: maps with a type tag today, arrays with the tag first in older versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tests.support.naive_map.events import (
    EVENTS_PER_BATCH_MAX,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    EngineHash,
    EventFormatError,
    UnknownEvent,
)

_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_DECODER: Final = msgspec.msgpack.Decoder()


def decode_vllm_batch(payload: bytes) -> EngineBatch:
    """The events of one frame's payload. Raises EventFormatError on anything else."""
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventFormatError("a batch must be an array of time, events and rank")
    if not isinstance(batch[0], (int, float)):
        raise EventFormatError("a batch must begin with its time")
    if len(batch[1]) > EVENTS_PER_BATCH_MAX:
        raise EventFormatError(f"more than {EVENTS_PER_BATCH_MAX} events in one batch")
    rank = batch[2] if len(batch) > 2 and isinstance(batch[2], int) else None
    return EngineBatch(float(batch[0]), tuple(_event(event) for event in batch[1]), rank)


def _event(raw: Any) -> EngineEvent:
    if isinstance(raw, Mapping):
        return _from_fields(str(raw.get("type")), raw)
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        names = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(raw[0], ())
        return _from_fields(raw[0], dict(zip(names, raw[1:], strict=False)))
    raise EventFormatError("an event must be a map, or an array that begins with its type")


def _from_fields(kind: str, fields: Mapping[str, Any]) -> EngineEvent:
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return BlocksRemoved(
            _hashes(fields.get("block_hashes")), _text(fields.get("medium")), _whole(fields.get("group_idx"), 0)
        )
    if kind == "AllBlocksCleared":
        return AllCleared()
    return UnknownEvent(kind)


def _stored(fields: Mapping[str, Any]) -> BlocksStored:
    hashes = _hashes(fields.get("block_hashes"))
    tokens = fields.get("token_ids")
    size = _whole(fields.get("block_size"), 0)
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise EventFormatError("token_ids must be whole numbers")
    if size <= 0 or len(tokens) % size or len(tokens) < size * len(hashes):
        raise EventFormatError(f"{len(tokens)} tokens do not fill {len(hashes)} blocks of {size}")
    parent = fields.get("parent_block_hash")
    extra = fields.get("extra_keys")
    if extra is not None and (not isinstance(extra, list) or len(extra) != len(hashes)):
        raise EventFormatError("extra_keys must have an entry for every block")
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tuple(tokens),
        block_size_tokens=size,
        has_lora=fields.get("lora_id") is not None or _text(fields.get("lora_name")) is not None,
        lora_name=_text(fields.get("lora_name")),
        medium=_text(fields.get("medium")),
        extra_keys=None if extra is None else tuple(extra),
        group=_whole(fields.get("group_idx"), 0),
        group_kind=_text(fields.get("kv_cache_spec_kind")),
    )


def _hashes(raw: Any) -> tuple[EngineHash, ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
        raise EventFormatError("block_hashes must be an array")
    return tuple(_hash(entry) for entry in raw)


def _hash(raw: Any) -> EngineHash:
    if isinstance(raw, (int, bytes)) and not isinstance(raw, bool):
        return raw
    raise EventFormatError("a block hash must be a number or bytes")


def _text(raw: Any) -> str | None:
    return raw if isinstance(raw, str) else None


def _whole(raw: Any, default: int) -> int:
    return raw if type(raw) is int else default
