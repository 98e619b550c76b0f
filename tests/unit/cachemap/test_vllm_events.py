from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.cachemap.events import AllCleared, BlocksRemoved, BlocksStored, EventFormatError, UnknownEvent
from infera.cachemap.vllm_events import decode_vllm_batch
from tests.support.engine_events import CLEARED, frame, removed, stored

TOKENS = list(range(32))


def test_maps_of_todays_engines() -> None:
    batch = decode_vllm_batch(
        frame(
            stored([1, 2], None, TOKENS, extra_keys=[["salt"], None], group_idx=0, kv_cache_spec_kind="full_attention"),
            removed([2], group_idx=1),
            CLEARED,
            {"type": "SomethingNew"},
        )
    )
    first, second, third, fourth = batch.events
    assert isinstance(first, BlocksStored)
    assert (first.hashes, first.parent, first.tokens, first.block_size_tokens) == ((1, 2), None, tuple(TOKENS), 16)
    assert first.extra_keys == (["salt"], None)
    assert second == BlocksRemoved((2,), "GPU", 1)
    assert third == AllCleared()
    assert fourth == UnknownEvent("SomethingNew")
    assert batch.dp_rank == 0


def test_arrays_of_older_engines() -> None:
    older = [
        ["BlockStored", [b"h" * 32], b"p" * 32, TOKENS[:16], 16, None],
        ["BlockRemoved", [b"h" * 32]],
        ["AllBlocksCleared"],
        ["BlockStored", [9], None, TOKENS[:16], 16, 3, "GPU"],
    ]
    first, second, third, fourth = decode_vllm_batch(frame(*older)).events
    assert isinstance(first, BlocksStored)
    assert (first.hashes, first.parent, first.medium, first.has_lora) == ((b"h" * 32,), b"p" * 32, None, False)
    assert second == BlocksRemoved((b"h" * 32,))
    assert third == AllCleared()
    assert isinstance(fourth, BlocksStored)
    assert fourth.has_lora


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        frame(7),
        frame([]),
        frame(stored([1], None, TOKENS)),
        frame(stored([1], None, ["a"] * 16)),
        frame(stored([1.5], None, TOKENS[:16])),
        frame(stored([1], None, TOKENS[:16], block_size=0)),
        frame(stored([1], None, TOKENS[:16], extra_keys=[None, None])),
        frame({"type": "BlockRemoved", "block_hashes": 4}),
    ],
)
def test_anything_else_is_an_error(payload: bytes) -> None:
    with pytest.raises(EventFormatError):
        decode_vllm_batch(payload)


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(payload: bytes) -> None:
    with contextlib.suppress(EventFormatError):
        decode_vllm_batch(payload)


@given(st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=4)))
def test_random_structures_never_crash(content: Any) -> None:
    with contextlib.suppress(EventFormatError):
        decode_vllm_batch(msgspec.msgpack.encode(content))
