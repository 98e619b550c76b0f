"""The C decoders against the plain Python ones, and against bytes that are no events at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.cachemap.interface import Target, Tier
from infera.cachemap.native_map import EngineDecoder, KvdDecoder, NativeCacheMap
from tests.support.engine_events import CLEARED, frame, removed, stored
from tests.support.naive_map.engine_index import EngineIndex
from tests.support.naive_map.events import EventFormatError
from tests.support.naive_map.python_map import PythonCacheMap
from tests.support.naive_map.vllm_events import decode_vllm_batch

TOKENS = list(range(32))
A, B = b"a" * 16, b"b" * 16

names = st.one_of(st.integers(0, 6), st.sampled_from([b"h" * 32, b"g" * 32, 2**64 - 1, -(2**63)]))
media = st.sampled_from([None, "GPU", "CPU", "DISK", "TAPE"])
ADAPTERS = {"sql": b"digest of sql", "law": b"digest of law"}
lora_names = st.sampled_from([None, None, "sql", "law", "unheard of"])
image_keys = st.tuples(st.sampled_from(["cat", "dog", ""]), st.integers(-40, 50)).map(list)
odd_keys = st.sampled_from([3, None, "late", ["cat"], ["cat", "x"], [1, 2], b"digest", ["cat", 1.5], {}])


@st.composite
def block_extras(draw: st.DrawFn, lora_name: str | None, is_first: bool) -> Any:
    """One block's extra keys, mostly as vLLM writes them."""
    if draw(st.sampled_from([False] * 12 + [True])):
        return draw(st.sampled_from(["text", 5, [draw(odd_keys)]]))
    images = sorted(draw(st.lists(image_keys, max_size=2)), key=lambda key: key[1])
    if draw(st.sampled_from([False] * 8 + [True])):
        images = images[::-1]
    salt = ["tenant"] if is_first and draw(st.booleans()) else []
    keys = [*([lora_name] if lora_name else []), *images, *salt]
    return keys or draw(st.sampled_from([None, []]))


@st.composite
def events(draw: st.DrawFn) -> Any:
    """An event as a map, or as the array of older versions."""
    kind = draw(st.sampled_from(["stored", "stored", "stored", "removed", "cleared", "other"]))
    if kind == "cleared":
        return draw(st.sampled_from([CLEARED, ["AllBlocksCleared"]]))
    if kind == "other":
        return {"type": "SomethingNew", "block_hashes": 5}
    hashes = draw(st.lists(names, max_size=3))
    medium = draw(media)
    if kind == "removed":
        as_array = ["BlockRemoved", hashes, medium]
        return as_array if draw(st.booleans()) else removed(hashes, medium=medium)
    size = draw(st.sampled_from([16, 32, 48, 24]))
    token = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, -1])
    left_out = draw(st.sampled_from([0, 0, 0, 1, 2]))
    tokens = [draw(token)] * (size * (len(hashes) + left_out))
    parent = draw(st.none() | names)
    name = draw(lora_names)
    lora = 7 if name else draw(st.sampled_from([None, None, None, 7]))
    extra_keys = None
    if draw(st.booleans()):
        extra_keys = [draw(block_extras(name, parent is None and at == 0)) for at in range(len(hashes))]
    if draw(st.booleans()):
        return ["BlockStored", hashes, parent, tokens, size, lora, medium, name, extra_keys, 0, "full_attention"]
    return stored(hashes, parent, tokens, size, medium=medium, lora_id=lora, lora_name=name, extra_keys=extra_keys)


@given(st.lists(st.lists(events(), max_size=6), max_size=8))
def test_frames_mean_the_same_to_both(frames: list[list[Any]]) -> None:
    native, naive = NativeCacheMap(4096), PythonCacheMap()
    holder, other = native.add_holder("w"), naive.add_holder("w")
    decoder = EngineDecoder(native, holder, adapters=ADAPTERS)
    index = EngineIndex(naive, other, Counter(), adapters=ADAPTERS)
    for batch in frames:
        payload = frame(*batch)
        assert decoder.apply(payload)
        index.apply(decode_vllm_batch(payload))
        assert native.blocks_by_tier(holder) == naive.blocks_by_tier(other)
    assert native.audit() is None
    for tier in (Tier.HBM, Tier.RAM, Tier.DISK):
        for key in naive.keys(other, tier):
            assert native.match(key, [Target(1, holder)])[0].total_tokens == 16, "under the same key"
    assert decoder.alias_count == index.alias_count
    counted = native.counters("engine")
    del counted["frames"]
    plain = index.counters
    plain["block_size"] = plain.pop("block_size_below_grain", 0)
    # A removal in a group never heard of belongs to no group; the plain index takes it as unknown.
    plain["removed_unknown"] += plain.pop("other_group", 0)
    counted["removed_unknown"] += counted.pop("other_group", 0)
    assert +counted == +plain


BROKEN = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({}),
    msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode([1.0, {}]),
    msgspec.msgpack.encode(["now", []]),
    frame(7),
    frame([]),
    frame(stored([1, 2, 3], None, TOKENS)),
    frame(stored([1], None, TOKENS[:24])),
    frame(stored([1], None, ["a"] * 16)),
    frame(stored([1], None, [True] * 16)),
    frame(stored([1.5], None, TOKENS[:16])),
    frame(stored([1], None, TOKENS[:16], block_size=0)),
    frame(stored([1], None, TOKENS[:16], extra_keys=[None, None])),
    frame({"type": "BlockRemoved", "block_hashes": 4}),
    frame(CLEARED) + b"\x00",
    b"\x92\x00\xdd\xff\xff\xff\xff",  # four thousand million events in seven bytes
    b"\x92\x00\x91\x82\xa9token_ids\xdd\x7f\xff\xff\xff",
    b"\x91" * 100_000,  # as deep as it is long
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_anything_else_is_refused_and_counted(number: int) -> None:
    cache_map = NativeCacheMap(64)
    decoder = EngineDecoder(cache_map, cache_map.add_holder("w"))
    assert not decoder.apply(BROKEN[number])
    assert cache_map.counters("engine")["bad_frame"] == 1


def test_every_cut_of_a_frame_is_refused() -> None:
    whole = frame(
        stored([1, 2**63], b"p" * 32, TOKENS, extra_keys=[["salt"], None], medium="CPU"), removed([1]), ["Unheard", 3.5]
    )
    cache_map = NativeCacheMap(64)
    decoder = EngineDecoder(cache_map, cache_map.add_holder("w"))
    assert decoder.apply(whole)
    for end in range(len(whole)):
        assert not decoder.apply(whole[:end]), end
    assert cache_map.audit() is None


@given(st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=4)))
def test_random_structures_are_judged_alike(content: Any) -> None:
    payload = msgspec.msgpack.encode(content)
    cache_map = NativeCacheMap(64)
    try:
        decode_vllm_batch(payload)
        is_sound = True
    except EventFormatError:
        is_sound = False
    assert EngineDecoder(cache_map, cache_map.add_holder("w")).apply(payload) is is_sound


@given(st.binary(max_size=300))
def test_random_bytes_never_crash(payload: bytes) -> None:
    cache_map = NativeCacheMap(64)
    EngineDecoder(cache_map, cache_map.add_holder("w")).apply(payload)
    KvdDecoder(cache_map).apply(payload)
    assert cache_map.audit() is None


def kvd_frame(*said: Any) -> bytes:
    """A frame as kvd writes it."""
    return msgspec.msgpack.encode({"ts": 1.0, "events": list(said)})


def change(**fields: Any) -> dict[str, Any]:
    """One kvd event."""
    base = {"type": "stored", "tier": "ram", "namespace": "00", "model": "m", "group": 0, "keys": A + B}
    return base | fields


def test_kvds_events_go_to_the_holder_of_their_namespace() -> None:
    cache_map = NativeCacheMap(64)
    decoder, holder = KvdDecoder(cache_map), cache_map.add_holder("kvd", counts_copies=False)
    decoder.set_namespace("00", holder)
    assert decoder.apply(kvd_frame(change(), change(tier="disk"), change(tier="peer", keys=A), change(tier="store")))
    assert cache_map.blocks_by_tier(holder) == {Tier.RAM: 2, Tier.DISK: 2, Tier.PEER: 2}
    assert decoder.apply(kvd_frame(change(type="removed", tier="disk"), change(type="removed", keys=A)))
    assert cache_map.blocks_by_tier(holder) == {Tier.RAM: 1, Tier.PEER: 2}
    assert decoder.apply(kvd_frame({"type": "new"}, change(tier="moon"), change(namespace="11"), change(group=1)))
    assert decoder.apply(kvd_frame({"type": "cleared"}))
    assert cache_map.blocks_by_tier(holder) == {}
    assert cache_map.counters("kvd") == {
        "stored": 7,
        "removed": 3,
        "unknown_event": 2,
        "other_namespace": 2,
        "other_group": 2,
        "cleared": 1,
        "frames": 4,
    }
    decoder.drop_namespace("00")
    decoder.apply(kvd_frame(change()))
    assert cache_map.entry_count == 0


def test_a_kvds_namespaces_are_bounded() -> None:
    cache_map = NativeCacheMap(64)
    decoder, holder = KvdDecoder(cache_map), cache_map.add_holder("kvd")
    for number in range(256):
        decoder.set_namespace(f"{number:x}", holder)
    with pytest.raises(ValueError, match="256"):
        decoder.set_namespace("one more", holder)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"events": 4}),
        msgspec.msgpack.encode({"ts": 4}),
        kvd_frame(3),
        kvd_frame(change(keys=b"short")),
        kvd_frame(change(keys="text")),
        kvd_frame(change(namespace=None)),
        kvd_frame(change(group="0")),
        kvd_frame(change()) + b"\x01",
    ],
)
def test_anything_else_from_a_kvd_is_refused(payload: bytes) -> None:
    cache_map = NativeCacheMap(64)
    decoder = KvdDecoder(cache_map)
    decoder.set_namespace("00", cache_map.add_holder("kvd"))
    assert not decoder.apply(payload)
    assert cache_map.counters("kvd")["bad_frame"] == 1


def test_a_copy_that_finds_no_room_takes_nothing_with_it() -> None:
    """A full map: the same blocks under other names are refused, and the first ones stay as they are."""
    cache_map = NativeCacheMap(64)
    holder = cache_map.add_holder("w")
    decoder = EngineDecoder(cache_map, holder)
    tokens = list(range(64 * 16))
    assert decoder.apply(frame(stored(list(range(64)), None, tokens, 16)))
    assert decoder.apply(frame(stored(list(range(100, 164)), None, tokens, 16)))
    assert cache_map.audit() is None
    assert cache_map.blocks_by_tier(holder) == {Tier.HBM: 64}
    assert cache_map.counters("engine")["refused_full"] == 64
    assert decoder.apply(frame(removed(list(range(100, 164)))))
    assert cache_map.blocks_by_tier(holder) == {Tier.HBM: 64}
    assert decoder.apply(frame(removed(list(range(64)))))
    assert cache_map.entry_count == 0
    assert cache_map.audit() is None
