"""Keys of blocks, extended as tokens arrive, equal those of the whole chain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core.keys import GRAIN_TOKENS, KEY_BYTES, chain_keys, root_key
from infera_vllm.request_keys import RequestKeys


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    block_size=st.sampled_from([16, 32, 64, 128]),
    salt=st.sampled_from([None, "", "tenant"]),
)
def test_extension_equals_the_whole(tokens: list[int], cuts: list[int], block_size: int, salt: str | None) -> None:
    keys = RequestKeys(block_size, salt)
    for cut in sorted(cuts):
        assert keys.extend(tokens[:cut]) == min(cut, len(tokens)) // block_size
    blocks = keys.extend(tokens)
    whole = chain_keys(root_key(salt=(salt or "").encode()), tokens)
    step = block_size // GRAIN_TOKENS
    expected = b"".join(
        whole[(i + 1) * step * KEY_BYTES - KEY_BYTES : (i + 1) * step * KEY_BYTES] for i in range(blocks)
    )
    assert keys.blocks(0, blocks) == expected
    if blocks:
        assert keys.blocks(blocks - 1, blocks) == expected[-KEY_BYTES:]
        assert keys.depth_grains(blocks - 1) == blocks * step


def test_salt_changes_every_key() -> None:
    tokens = list(range(64))
    plain, salted = RequestKeys(32, None), RequestKeys(32, "a")
    assert plain.extend(tokens) == salted.extend(tokens) == 2
    assert {plain.blocks(0, 1), plain.blocks(1, 2)}.isdisjoint({salted.blocks(0, 1), salted.blocks(1, 2)})


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        RequestKeys(16, None).extend([token] * 16)
