"""Keys of a request's blocks: extended as tokens arrive, and different wherever the blocks' bytes would be."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core.keys import GRAIN_TOKENS, IDENTITY_BYTES_MAX, KEY_BYTES, chain_keys, extra_key, image_extra, root_key
from infera_vllm.request_keys import RequestKeys, is_cacheable

TOKENS = list(range(1, 161))


def request(**fields: Any) -> Any:
    """The fields of vLLM's Request that keys depend on."""
    plain = {
        "cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None, "pooling_params": None,
        "prompt_token_ids": TOKENS, "sampling_params": SimpleNamespace(prompt_logprobs=None), "resumable": False,
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**(plain | fields))


def image(identifier: Any, offset: int, length: int = 20) -> Any:
    """One of a request's mm_features."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def keys_of(adapter: bytes | None = None, tokens: list[int] = TOKENS, **fields: Any) -> list[bytes]:
    """The keys of all grains."""
    lora = None if adapter is None else object()
    keys = RequestKeys(request(lora_request=lora, **fields), adapter)
    packed = keys.block_keys(GRAIN_TOKENS, 0, keys.extend(tokens))
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


images = st.lists(st.tuples(st.sampled_from(["cat", "dog"]), st.integers(0, 420)), max_size=5)


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 400),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    salt=st.sampled_from([None, "", "tenant"]),
    adapter=st.sampled_from([None, b"a" * 16]),
    places=images,
)
def test_extension_equals_the_whole(
    seed: int,
    count: int,
    cuts: list[int],
    block_size: int,
    salt: str | None,
    adapter: bytes | None,
    places: list[tuple[str, int]],
) -> None:
    """Against the definition, grain by grain."""
    dice = random.Random(seed)
    tokens = [dice.randrange(2**32) for _ in range(count)]
    features = [image(*place) for place in sorted(places, key=lambda place: place[1])]
    lora = None if adapter is None else object()
    keys = RequestKeys(request(cache_salt=salt, lora_request=lora, mm_features=features), adapter)
    for cut in sorted(cuts):
        assert keys.extend(tokens[:cut]) == min(cut, len(tokens)) // GRAIN_TOKENS
    grains = keys.extend(tokens)
    parent, expected = root_key(salt=(salt or "").encode(), lora=adapter or b""), []
    for grain in range(len(tokens) // GRAIN_TOKENS):
        start = grain * GRAIN_TOKENS
        begun = [f for f in features if start <= f.mm_position.offset < start + GRAIN_TOKENS]
        if begun:
            extra = b"".join(image_extra(f.identifier.encode(), f.mm_position.offset - start) for f in begun)
            parent = extra_key(parent, extra)
        parent = chain_keys(parent, tokens[start : start + GRAIN_TOKENS])
        expected.append(parent)
    assert grains == len(expected)
    step, blocks = block_size // GRAIN_TOKENS, keys.block_count(block_size)
    assert blocks == len(tokens) // block_size
    assert keys.block_keys(block_size, 0, blocks) == b"".join(expected[step - 1 :: step])
    if blocks:
        assert keys.block_keys(block_size, blocks - 1, blocks) == expected[blocks * step - 1]
        assert keys.depth_grains(block_size, blocks - 1) == blocks * step
    with pytest.raises(IndexError, match="not filled"):
        keys.block_keys(block_size, 0, blocks + 1)


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "tenant"},
        {"adapter": b"a" * 16},
        {"adapter": b"b" * 16},
        {"cache_salt": "a" * 16},
        {"cache_salt": "tenant", "adapter": b"a" * 16},
        {"mm_features": [image("cat", 0)]},
        {"mm_features": [image("cat", 1)]},
        {"mm_features": [image("dog", 0)]},
        {"mm_features": [image("cat", 0), image("dog", 3)]},
    ],
)
def test_nothing_that_shapes_a_block_leaves_its_key_as_it_was(more: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "other"},
        {"adapter": b"c" * 16},
        {"mm_features": [image("x", 0)]},
    ]
    ours = set(keys_of(**more))
    for kind in kinds:
        assert ours.isdisjoint(keys_of(**kind)), kind


def test_a_prefix_before_an_image_is_shared_and_nothing_after_its_start() -> None:
    plain, cat, dog = keys_of(), keys_of(mm_features=[image("cat", 40)]), keys_of(mm_features=[image("dog", 40)])
    assert plain[:2] == cat[:2] == dog[:2]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[2:], cat[2:], dog[2:], strict=True))


def test_images_of_one_grain_do_not_swap() -> None:
    one, other = (
        keys_of(mm_features=[image("a", 3), image("b", 9)]),
        keys_of(mm_features=[image("b", 3), image("a", 9)]),
    )
    assert set(one).isdisjoint(other)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        keys_of(tokens=[token] * 16)


@pytest.mark.parametrize("size", [0, 8, 24, -16])
def test_blocks_that_are_no_whole_grains_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="divide"):
        RequestKeys(request(), None).block_count(size)


@pytest.mark.parametrize(("lora", "digest"), [(object(), None), (None, b"a" * 16)])
def test_a_lora_never_gets_the_base_models_keys(lora: Any, digest: bytes | None) -> None:
    """A species of failures.md: a LoRA's blocks matching the base model."""
    with pytest.raises(ValueError, match="digest"):
        RequestKeys(request(lora_request=lora), digest)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"pooling_params": object()}, "pooling"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"prompt_token_ids": None}, "embeddings"),
        ({"resumable": True}, "streamed"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, "prompt logprobs"),
        ({"skip_reading_prefix_cache": True}, "not to read"),
        ({"cache_salt": "x" * (IDENTITY_BYTES_MAX + 1)}, "salt"),
        ({"cache_salt": "\ud800"}, "salt"),
        ({"mm_features": [image("", 0)]}, "images"),
        ({"mm_features": [image("é" * IDENTITY_BYTES_MAX, 0)]}, "images"),
        ({"mm_features": [image("cat", 0, 0)]}, "images"),
        ({"mm_features": [image("cat", 0), image(None, 30)]}, "images"),
    ],
)
def test_what_keys_cannot_name_has_a_reason(fields: dict[str, Any], word: str) -> None:
    reason = is_cacheable(request(**fields))
    assert reason is not None
    assert word in reason


def test_everything_else_is_cacheable() -> None:
    assert is_cacheable(request()) is None
    asked = request(cache_salt="x" * IDENTITY_BYTES_MAX, lora_request=object(), mm_features=[image("cat", 0)])
    assert is_cacheable(asked) is None
    assert len(keys_of(cache_salt="x" * IDENTITY_BYTES_MAX)) == 10
