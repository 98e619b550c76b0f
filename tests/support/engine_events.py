"""Builds vLLM's event frames by hand, independently of our decoder."""

from __future__ import annotations

from typing import Any

import msgspec


def stored(hashes: list[Any], parent: Any, tokens: list[int], size: int = 16, **more: Any) -> dict[str, Any]:
    """A BlockStored event as today's engines write it."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }
    return event | more


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    """A BlockRemoved event."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def frame(*events: Any) -> bytes:
    """A batch's payload."""
    return msgspec.msgpack.encode([1.5, list(events), 0])
