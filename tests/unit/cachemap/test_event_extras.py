"""Salt, adapter and images in an engine's events: entered under exactly the keys that the plugin gives requests."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core.keys import KEY_BYTES, chain_keys, root_key
from infera_vllm.request_keys import RequestKeys

from infera.cachemap.interface import Target
from infera.cachemap.native_map import ADAPTER_DIGEST_BYTES_MAX, ADAPTER_NAME_BYTES_MAX, EngineDecoder, NativeCacheMap
from tests.support.engine_events import frame, stored

DIGEST = b"digest of sql"
TOKENS = list(range(1, 321))
IMAGES_MAX = 1024


class World:
    """One engine's events in a map, and a way to ask it."""

    def __init__(self, **adapters: bytes) -> None:
        self.map = NativeCacheMap(8192)
        self.holder = self.map.add_holder("w")
        self.decoder = EngineDecoder(self.map, self.holder, adapters=adapters)

    def apply(self, *events: Any) -> None:
        assert self.decoder.apply(frame(*events))
        assert self.map.audit() is None

    def hit(self, keys: bytes, stride: int = 1) -> int:
        """Tokens of the prompt with these keys that are known."""
        return self.map.match(keys, [Target(stride, self.holder)])[0].total_tokens

    def counted(self, name: str) -> int:
        return self.map.counters("engine")[name]


def image(identifier: str, offset: int, length: int) -> Any:
    """One of a vLLM request's mm_features."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def block_extras(request: Any, start: int, stop: int) -> list[Any] | None:
    """One block's extra keys as vLLM's `generate_block_hash_extra_keys` and `to_event_extra_keys` write them."""
    keys: list[Any] = [request.lora_request.lora_name] if request.lora_request else []
    for feature in request.mm_features:
        place = feature.mm_position
        if stop > place.offset and start < place.offset + place.length:
            keys.append([feature.identifier, place.offset - start])
    if start == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    return keys or None


def events_of(request: Any, tokens: list[int], size: int, cuts: list[int]) -> list[dict[str, Any]]:
    """The events of a request whose blocks are stored in several steps."""
    found, blocks = [], len(tokens) // size
    for first, end in zip([0, *cuts], [*cuts, blocks], strict=True):
        extras = [block_extras(request, block * size, (block + 1) * size) for block in range(first, end)]
        lora = request.lora_request
        more = {"lora_id": 1, "lora_name": lora.lora_name} if lora else {}
        parent = first - 1 if first else None
        part = tokens[first * size : end * size]
        found.append(stored(list(range(first, end)), parent, part, size, extra_keys=extras, **more))
    return found


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([16, 32, 64]),
    salt=st.sampled_from([None, "tenant", "sql"]),
    has_lora=st.booleans(),
    places=st.lists(st.tuples(st.sampled_from(["cat", "dog", "sql:cat"]), st.integers(0, 300), st.integers(1, 90))),
    cuts=st.sets(st.integers(1, 4)),
)
def test_events_and_requests_have_the_same_keys(
    seed: int, size: int, salt: str | None, has_lora: bool, places: list[tuple[str, int, int]], cuts: set[int]
) -> None:
    """Also where an image ends in another block than it begins, or several lie in one block."""
    dice = random.Random(seed)
    features: list[Any] = []
    for name, offset, length in sorted(places, key=lambda place: place[1]):
        if not features or offset >= features[-1].mm_position.offset + features[-1].mm_position.length:
            features.append(image(name, offset, length))
    lora = SimpleNamespace(lora_name="sql") if has_lora else None
    request = SimpleNamespace(cache_salt=salt, lora_request=lora, mm_features=features)
    tokens = [dice.randrange(1000) for _ in range(320)]
    keys = RequestKeys(request, DIGEST if has_lora else None)
    keys.extend(tokens)
    world = World(sql=DIGEST)
    world.apply(*events_of(request, tokens, size, sorted(cuts)))
    blocks = 320 // size
    assert world.map.entry_count == blocks
    for block in range(blocks):
        key = keys.block_keys(size, block, block + 1)
        assert world.map.match(key, [Target(1, world.holder)])[0].total_tokens == 16, (block, "under another key")


def grain_keys(tokens: list[int] = TOKENS, *, salt: bytes = b"", lora: bytes = b"") -> bytes:
    return chain_keys(root_key(salt=salt, lora=lora), tokens)


def test_one_image_or_another_or_none_never_match_each_other() -> None:
    world = World()
    world.apply(stored([1, 2], None, TOKENS[:32], extra_keys=[[["cat", 3]], [["cat", -13]]]))
    asked = SimpleNamespace(cache_salt=None, lora_request=None)
    for features, hit in (([], 0), ([image("dog", 3, 20)], 0), ([image("cat", 4, 20)], 0), ([image("cat", 3, 20)], 32)):
        keys = RequestKeys(SimpleNamespace(**vars(asked), mm_features=features), None)
        keys.extend(TOKENS)
        assert world.hit(keys.block_keys(16, 0, 20)) == hit, features


@pytest.mark.parametrize("events", [1, 4])
def test_the_images_of_an_event_are_bounded(events: int) -> None:
    count = IMAGES_MAX * events + 1
    tokens = [7] * (16 * count)
    extras = [[[f"image {number}", 0]] for number in range(count)]
    world = World()
    world.apply(stored(list(range(count)), None, tokens, extra_keys=extras))
    assert world.map.entry_count == 0
    assert world.counted("images_over_limit") == count
    world.apply(stored(list(range(IMAGES_MAX)), None, tokens[: 16 * IMAGES_MAX], extra_keys=extras[:IMAGES_MAX]))
    assert world.map.entry_count == IMAGES_MAX


def test_one_long_image_over_many_blocks_is_one_image() -> None:
    """A film's blocks all name it; only where it begins does it enter the chain."""
    count = 3 * IMAGES_MAX
    world = World()
    extras = [[["film", 4 - 16 * block]] for block in range(count)]
    world.apply(stored(list(range(count)), None, [7] * (16 * count), extra_keys=extras))
    assert world.map.entry_count == count


def test_a_loras_blocks_never_match_the_base_model() -> None:
    """A species of failures.md: a LoRA's blocks matched the base model."""
    world = World(sql=DIGEST)
    base = stored([1], None, TOKENS[:16])
    world.apply(base, stored([2], None, TOKENS[16:32], lora_id=1, lora_name="sql", extra_keys=[["sql"]]))
    assert (world.hit(grain_keys()), world.hit(grain_keys(TOKENS[16:]))) == (16, 0)
    assert (world.hit(grain_keys(TOKENS[16:], lora=DIGEST)), world.hit(grain_keys(lora=DIGEST))) == (16, 0)
    world.apply(stored([3], None, TOKENS[32:48], lora_id=2, extra_keys=[["law"]]))
    world.apply(stored([4], None, TOKENS[32:48], lora_id=2, lora_name="law", extra_keys=[["law"]]))
    assert world.counted("lora") == 2
    assert world.map.entry_count == 2


def test_sglang_27386_hits_of_an_adapter_are_not_silently_zero() -> None:
    """sglang#27386: nothing ever matched and nobody noticed. Here what is left out is counted, and ends when it can."""
    world = World()
    event = {"lora_id": 1, "lora_name": "sql", "extra_keys": [["sql"], ["sql"]]}
    world.apply(stored([1, 2], None, TOKENS[:32], **event))
    assert world.counted("lora") == 2
    world.decoder.set_adapters({"sql": DIGEST})
    world.apply(stored([3, 4], None, TOKENS[:32], **event))
    assert world.hit(grain_keys(lora=DIGEST)) == 32


def test_changed_adapters_keep_what_is_known() -> None:
    world = World(sql=DIGEST)
    lora = {"lora_id": 1, "lora_name": "sql", "extra_keys": [["sql"]]}
    world.apply(stored([1], None, TOKENS[:16], **lora), stored([9], None, TOKENS[:16]))
    world.decoder.set_adapters({"sql": b"other content", "law": b"law"})
    world.apply(stored([2], None, TOKENS[:16], **lora), stored([3], 1, TOKENS[16:32], **lora))
    assert world.hit(grain_keys(lora=b"other content")) == 16
    assert world.hit(grain_keys(lora=DIGEST)) == 32, "what goes on from a block goes on with its adapter"
    assert world.hit(grain_keys()) == 16
    world.decoder.set_adapters({})
    world.apply(stored([4], None, TOKENS[:16], **lora))
    assert world.counted("lora") == 1


@pytest.mark.parametrize(
    "adapters",
    [
        {"": b"d"},
        {"n" * (ADAPTER_NAME_BYTES_MAX + 1): b"d"},
        {"n": b""},
        {"n": b"d" * (ADAPTER_DIGEST_BYTES_MAX + 1)},
        {f"n{number}": b"d" for number in range(100_000)},
    ],
)
def test_adapters_are_bounded_and_a_refusal_changes_nothing(adapters: dict[str, bytes]) -> None:
    world = World(sql=DIGEST)
    with pytest.raises(ValueError, match="LoRA adapters"):
        world.decoder.set_adapters(adapters)
    with pytest.raises(ValueError, match="LoRA adapters"):
        EngineDecoder(world.map, world.holder, adapters=adapters)
    world.apply(stored([1], None, TOKENS[:16], lora_name="sql"))
    assert world.hit(grain_keys(lora=DIGEST)) == 16


def test_a_salt_too_long_for_a_key_is_left_out() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16], extra_keys=[["s" * 65_537]]))
    world.apply(stored([1], None, TOKENS[:16], extra_keys=[["s" * 65_536]]))
    assert world.counted("extra_keys") == 1
    assert world.hit(grain_keys(salt=b"s" * 65_536)) == 16


@pytest.mark.parametrize("size", [4, 8])
def test_images_over_pages_below_the_grain_are_left_out(size: int) -> None:
    world = World()
    pages = 16 // size
    world.apply(stored(list(range(pages)), None, TOKENS[:16], size, extra_keys=[[["cat", 0]], *[None] * (pages - 1)]))
    assert world.counted("extra_keys") == pages
    assert world.map.entry_count == 0


def test_identifiers_as_long_as_a_key_takes_are_read() -> None:
    long = ["é" * 32_768, "b" * 65_536]
    asked = SimpleNamespace(
        cache_salt=None, lora_request=None, mm_features=[image(long[0], 0, 2), image(long[1], 2, 9)]
    )
    keys = RequestKeys(asked, None)
    keys.extend(TOKENS[:16])
    world = World()
    world.apply(stored([1], None, TOKENS[:16], extra_keys=[[[long[0], 0], [long[1], 2]]]))
    assert world.hit(keys.block_keys(16, 0, 1)) == 16
    world.apply(stored([2], None, TOKENS[:16], extra_keys=[[["b" * 65_537, 0]]]))
    assert world.counted("extra_keys") == 1
    assert len(keys.block_keys(16, 0, 1)) == KEY_BYTES
