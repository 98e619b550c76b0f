"""vLLM's own requests and events: the plugin's keys and the router's decoder agree on them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from infera_vllm.request_keys import RequestKeys, is_cacheable
from vllm.distributed.kv_events import BlockStored, EventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from infera.cachemap.interface import Target
from infera.cachemap.native_map import EngineDecoder, NativeCacheMap

DIGEST = b"digest of sql"


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def request(tokens: list[int], **more: Any) -> Request:
    fields: dict[str, Any] = {"sampling_params": SamplingParams(max_tokens=1), "pooling_params": None}
    return Request("r", tokens, **(fields | more))


def frame(asked: Request, size: int, first: int, end: int) -> bytes:
    """What vLLM publishes when it has stored blocks `first` to `end`, as `BlockPool.cache_full_blocks` makes it."""
    extras, at = [], 0
    for block in range(first, end):
        keys, at = generate_block_hash_extra_keys(asked, block * size, (block + 1) * size, at)
        extras.append(keys)
    lora = asked.lora_request
    event = BlockStored(
        block_hashes=list(range(first, end)),
        parent_block_hash=first - 1 if first else None,
        token_ids=asked.all_token_ids[first * size : end * size],
        block_size=size,
        lora_id=lora.adapter_id if lora else None,
        medium="GPU",
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extras),
    )
    return msgspec.msgpack.encode(EventBatch(ts=0.0, events=[event]))


@pytest.mark.parametrize("seed", range(40))
def test_events_of_vllms_requests_have_the_keys_of_the_plugin(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice([16, 32, 128])
    tokens = [dice.randrange(1000) for _ in range(size * 8)]
    features, at = [], 0
    while at < len(tokens) - 2 and len(features) < 6:
        at += dice.randrange(0, size * 2)
        length = dice.randrange(1, size * 3)
        features.append(image(dice.choice(["cat", "dog", "sql:cat"]), at, length))
        at += length
    lora = LoRARequest("sql", 1, "/adapters/sql") if dice.random() < 0.5 else None
    asked = request(
        tokens,
        lora_request=lora,
        cache_salt=dice.choice([None, "tenant", "sql"]),
        mm_features=features if dice.random() < 0.8 else None,
    )
    assert is_cacheable(asked) is None
    cache_map = NativeCacheMap(4096)
    holder = cache_map.add_holder("w")
    decoder = EngineDecoder(cache_map, holder, adapters={"sql": DIGEST})
    cut = dice.randrange(1, 8)
    assert decoder.apply(frame(asked, size, 0, cut))
    assert decoder.apply(frame(asked, size, cut, 8))
    assert cache_map.entry_count == 8
    keys = RequestKeys(asked, DIGEST if lora else None)
    keys.extend(asked.all_token_ids)
    for block in range(8):
        key = keys.block_keys(size, block, block + 1)
        assert cache_map.match(key, [Target(1, holder)])[0].total_tokens == 16, block


def test_vllms_own_requests_that_keys_cannot_name() -> None:
    prompt_logprobs = SamplingParams(max_tokens=1, prompt_logprobs=1)
    skips = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    assert is_cacheable(request([1, 2])) is None
    assert "logprobs" in str(is_cacheable(request([1, 2], sampling_params=prompt_logprobs)))
    assert "prefix cache" in str(is_cacheable(request([1, 2], sampling_params=skips)))
    assert "streamed" in str(is_cacheable(request([1, 2], resumable=True)))
    assert "pooling" in str(
        is_cacheable(request([1, 2], sampling_params=None, pooling_params=PoolingParams(task="embed")))
    )


def test_a_windows_event_with_gaps_as_vllms_block_pool_publishes_it() -> None:
    """The tokens of eight blocks and the hashes of four: the decoder finds them, and the frame is no broken one."""
    size, tokens = 16, list(range(128))
    init_none_hash(sha256)
    asked = request(tokens, block_hasher=get_request_block_hasher(size, sha256), mm_features=[image("cat", 20, 30)])
    pool = BlockPool(64, enable_caching=True, hash_block_size=size, enable_kv_cache_events=True)
    mask = [False, False, True, True, False, False, True, True]
    for group, block_mask in ((0, mask), (1, None)):
        blocks = pool.get_new_blocks(8)
        pool.cache_full_blocks(asked, blocks, 0, 8, size, group, block_mask=block_mask)
    events = [event for event in pool.take_events() if isinstance(event, BlockStored)]
    assert [(len(event.block_hashes), len(event.token_ids)) for event in events] == [(4, 128), (8, 128)]
    kinds = {0: ("sliding_window", 33), 1: ("full_attention", None)}
    for event in events:
        event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = kinds[event.group_idx or 0]
    cache_map = NativeCacheMap(4096)
    holder = cache_map.add_holder("w")
    assert EngineDecoder(cache_map, holder).apply(msgspec.msgpack.encode(EventBatch(ts=0.0, events=events)))
    assert cache_map.counters("engine") == {"stored": 12, "frames": 1}
    keys = RequestKeys(asked, None)
    keys.extend(tokens)
    hits = [cache_map.match(keys.block_keys(size, 0, end), [Target(1, holder)])[0].total_tokens for end in range(1, 9)]
    assert hits == [0, 0, 0, 64, 64, 64, 64, 128]
