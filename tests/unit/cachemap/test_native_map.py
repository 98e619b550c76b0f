"""The C map against the plain Python one, and its limits."""

from __future__ import annotations

import mmap
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core.keys import KEY_BYTES

from infera.cachemap.interface import Match, Target, Tier
from infera.cachemap.native_map import MapReader, MapUnusableError, NativeCacheMap
from tests.support.naive_map.python_map import PythonCacheMap

KEYS = [bytes([number]) * KEY_BYTES for number in range(12)]
PROMPT = b"".join(KEYS)


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "replace", "tick"]),
        st.integers(0, 7),
        st.sampled_from(list(Tier)),
        st.lists(st.sampled_from(KEYS), max_size=12),
    ),
    max_size=60,
)


@given(operations, st.data())
def test_map_equals_the_plain_one(steps: list[tuple[str, int, Tier, list[bytes]]], data: st.DataObject) -> None:
    real, naive = NativeCacheMap(4096, seed=(1, 2)), PythonCacheMap()
    counts = [True] * 6 + [False] * 2
    pairs = [
        (real.add_holder(str(i), counts_copies=c), naive.add_holder(str(i), counts_copies=c))
        for i, c in enumerate(counts)
    ]
    for action, place, tier, keys in steps:
        mine, theirs = pairs[place]
        if action == "store":
            assert real.store(mine, tier, keys) == naive.store(theirs, tier, keys) == 0
        elif action == "remove":
            assert real.remove(mine, tier, keys) == naive.remove(theirs, tier, keys)
        elif action == "clear":
            real.clear(mine)
            naive.clear(theirs)
        elif action == "replace":
            real.drop_holder(mine)
            naive.drop_holder(theirs)
            made = (real.add_holder("", counts_copies=counts[place]), naive.add_holder("", counts_copies=counts[place]))
            pairs[place] = made
            with pytest.raises(KeyError):
                real.store(mine, tier, keys)
        else:
            real.tick(0)
        assert real.audit() is None
    own = st.sampled_from([None, *range(6)])
    wanted = data.draw(st.lists(st.tuples(st.integers(1, 6), own, st.sets(st.integers(0, 7), max_size=3)), max_size=20))
    targets = [
        [
            Target(stride, None if at is None else pairs[at][side], tuple(pairs[i][side] for i in shared))
            for stride, at, shared in wanted
        ]
        for side in (0, 1)
    ]
    assert real.match(PROMPT, targets[0]) == naive.match(PROMPT, targets[1])
    assert real.entry_count == naive.entry_count
    for mine, theirs in pairs:
        assert real.blocks_by_tier(mine) == naive.blocks_by_tier(theirs)


@given(st.integers(0, 2**32), st.integers(5, 200), st.integers(65, 150))
def test_many_holders_of_the_same_keys(seed: int, steps: int, holders: int) -> None:
    """Past four holders a key's set becomes a chain; it must grow, shrink and be swept without a trace."""
    dice = random.Random(seed)
    real, naive = NativeCacheMap(4096, seed=(3, 4)), PythonCacheMap()
    pairs = [(real.add_holder(""), naive.add_holder("")) for _ in range(holders)]
    for _ in range(steps):
        at = dice.randrange(holders)
        tier, keys = dice.choice((Tier.HBM, Tier.HBM, Tier.RAM)), KEYS[: dice.randrange(1, 13)]
        roll = dice.random()
        if roll < 0.7:
            real.store(pairs[at][0], tier, keys)
            naive.store(pairs[at][1], tier, keys)
        elif roll < 0.9:
            assert real.remove(pairs[at][0], tier, keys) == naive.remove(pairs[at][1], tier, keys)
        else:
            real.drop_holder(pairs[at][0])
            naive.drop_holder(pairs[at][1])
            pairs[at] = real.add_holder(""), naive.add_holder("")
        if dice.random() < 0.1:
            real.tick(0)
    assert real.audit() is None
    own = [[Target(1 + at % 3, pair[side], (pairs[0][side],)) for at, pair in enumerate(pairs)] for side in (0, 1)]
    assert real.match(PROMPT, own[0]) == naive.match(PROMPT, own[1])
    for pair in pairs:
        real.drop_holder(pair[0])
    while real.tick(0):
        pass
    assert real.audit() is None
    assert real.facts().nodes == real.entry_count == 0


def test_a_key_of_zeros_is_not_taken_for_a_free_node() -> None:
    """A free node's key field is a link in the list of free ones; the first link is all zeros."""
    made = NativeCacheMap(4096, seed=(1, 2))
    holder = made.add_holder("w")
    made.store(holder, Tier.HBM, [KEYS[1]])
    made.clear(holder)
    made.store(holder, Tier.HBM, [KEYS[0]])
    made.tick(0)
    assert made.match(PROMPT, [Target(1, holder)])[0].tokens_by_tier == {Tier.HBM: 16}


def test_a_missing_grain_between_does_not_end_a_wider_workers_match() -> None:
    made = NativeCacheMap(4096)
    holder = made.add_holder("w")
    made.store(holder, Tier.HBM, [KEYS[1], KEYS[3]])
    wide, narrow = made.match(PROMPT, [Target(2, holder), Target(1, holder)])
    assert wide.total_tokens == 64
    assert narrow.total_tokens == 0


def test_hbm_behind_a_gap_is_not_used_but_lower_tiers_are() -> None:
    made = NativeCacheMap(4096)
    own, kvd = made.add_holder("w"), made.add_holder("kvd", counts_copies=False)
    made.store(own, Tier.HBM, [KEYS[0], KEYS[2]])
    made.store(kvd, Tier.RAM, [KEYS[0], KEYS[1]])
    assert made.match(PROMPT, [Target(1, own, (kvd,))]) == [Match({Tier.HBM: 16, Tier.RAM: 16})]


def test_dropping_a_holder_leaves_nothing_and_its_place_is_used_again() -> None:
    made = NativeCacheMap(64)
    for _ in range(10_000):
        holder = made.add_holder("w")
        made.store(holder, Tier.HBM, KEYS)
        made.drop_holder(holder)
        assert made.match(PROMPT, [Target(1, holder)]) == [Match()]
    assert made.entry_count == 0
    fresh = made.add_holder("w")
    assert made.match(PROMPT, [Target(1, fresh)]) == [Match()]
    assert made.audit() is None


def test_holders_are_bounded() -> None:
    made = NativeCacheMap(64)
    holders = [made.add_holder("w") for _ in range(4095)]
    with pytest.raises(ValueError, match="4095"):
        made.add_holder("one more")
    made.store(holders[7], Tier.HBM, KEYS)
    made.clear(holders[7])
    made.drop_holder(holders[7])
    assert made.add_holder("again") not in holders


def test_without_counting_copies_one_removal_is_enough() -> None:
    made = NativeCacheMap(4096)
    holder = made.add_holder("kvd", counts_copies=False)
    made.store(holder, Tier.RAM, [KEYS[0], KEYS[0]])
    made.remove(holder, Tier.RAM, [KEYS[0]])
    assert made.entry_count == 0


def test_at_the_limit_new_blocks_are_refused_and_removals_make_room() -> None:
    made = NativeCacheMap(64)
    holder = made.add_holder("w")
    many = [number.to_bytes(KEY_BYTES, "big") for number in range(70)]
    assert made.store(holder, Tier.HBM, many) == 6
    assert made.store(holder, Tier.HBM, many[:1]) == 0, "a copy of what is there needs no room"
    assert made.blocks_by_tier(holder) == {Tier.HBM: 64}
    made.remove(holder, Tier.HBM, [many[2]])
    assert made.store(holder, Tier.HBM, [many[69]]) == 0
    assert made.audit() is None


def test_chunks_run_out_before_anything_breaks() -> None:
    made = NativeCacheMap(64)
    holders = [made.add_holder("") for _ in range(130)]
    refused = sum(made.store(holder, tier, KEYS[:6]) for holder in holders for tier in Tier)
    assert refused == 130 * 4 * 6 - 64
    assert made.audit() is None


def test_a_void_handle_matches_nothing_and_takes_nothing() -> None:
    made = NativeCacheMap(64)
    holder = made.add_holder("w")
    made.drop_holder(holder)
    assert made.match(PROMPT, [Target(1, holder), Target(1, 12345, (holder, 99))]) == [Match(), Match()]
    for call in (made.clear, made.drop_holder):
        with pytest.raises(KeyError):
            call(holder)


def test_too_many_targets_are_refused_and_not_cut_off() -> None:
    made = NativeCacheMap(64)
    holder = made.add_holder("w")
    assert len(made.match(PROMPT, [Target(1, holder)] * 4096)) == 4096
    with pytest.raises(ValueError, match="4096"):
        made.match(PROMPT, [Target(1, holder)] * 4097)
    with pytest.raises(ValueError, match="shared"):
        made.match(PROMPT, [Target(1, holder, (1, 2, 3, 4, 5))])


def test_dynamo_10774_an_index_that_never_freed() -> None:
    """dynamo#10774: 20 GB an hour. What is stored and removed leaves nothing behind."""
    made = NativeCacheMap(64)
    holder = made.add_holder("w")
    for number in range(20_000):
        key = number.to_bytes(KEY_BYTES, "big")
        assert made.store(holder, Tier.HBM, [key]) == 0
        assert made.remove(holder, Tier.HBM, [key]) == 0
    assert made.entry_count == made.facts().nodes == made.facts().aliases == 0
    assert made.audit() is None


def test_llm_d_router_1736_a_worker_that_left_leaves_no_entries() -> None:
    """llm-d-router#1736: a pod left, its entries stayed."""
    made = NativeCacheMap(4096)
    gone, other = made.add_holder("gone"), made.add_holder("other")
    for holder in (gone, other):
        made.store(holder, Tier.HBM, KEYS)
    made.drop_holder(gone)
    assert made.entry_count == 12
    again = made.add_holder("gone, on the same address")
    assert made.match(PROMPT, [Target(1, gone), Target(1, again), Target(1, other)])[:2] == [Match(), Match()]
    while made.tick(0):
        pass
    assert made.match(PROMPT, [Target(1, gone), Target(1, again)]) == [Match(), Match()]
    assert made.audit() is None


def test_counters_are_read_from_memory_that_is_still_there() -> None:
    """An array within a C struct does not keep the struct alive: what was read could be anybody's bytes."""
    made = NativeCacheMap(4096)
    # Freed memory between memory in use is written to by the C library, so reading it shows.
    blocks = [made.facts() for _ in range(100)]
    del blocks[::2]
    for _ in range(100):
        assert not made.counters("engine")
        assert not made.counters("kvd")


def test_sglang_39822_a_restarted_worker_holds_nothing_of_its_earlier_life() -> None:
    """sglang#39822: picks for caches that no longer existed after restarts."""
    made = NativeCacheMap(4096)
    holder = made.add_holder("w")
    for _ in range(100):
        made.store(holder, Tier.HBM, KEYS)
        made.clear(holder)
        assert made.match(PROMPT, [Target(1, holder)]) == [Match()]
    made.store(holder, Tier.HBM, KEYS[:1])
    assert made.match(PROMPT, [Target(1, holder)])[0].total_tokens == 16


@pytest.mark.parametrize("damage", ["magic", "version", "geometry", "short"])
def test_memory_that_is_no_map_is_refused(damage: str) -> None:
    made = NativeCacheMap(64)
    memory = mmap.mmap(-1, made._memory.size())
    memory[:] = made._memory[:]
    if damage == "short":
        memory = mmap.mmap(-1, 8192)
        memory[:] = made._memory[:8192]
    else:
        at = {"magic": 0, "version": 8, "geometry": 24}[damage]
        memory[at] ^= 1
    with pytest.raises(MapUnusableError):
        MapReader(memory)


def test_predictions_are_bounded_and_the_oldest_go_first() -> None:
    made = NativeCacheMap(200_000)
    first, second = made.add_holder("a"), made.add_holder("b")
    keys = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(80_000))
    assert made.predict(first, keys, now_ms=0) == 65_536 // 4
    for start in range(5):
        made.predict(second, keys[start * 16_384 * 16 :], now_ms=1)
    assert made.facts().predicted <= 65_536
    assert made.blocks_by_tier(first) == {}
    assert made.counters("engine")["predictions_dropped"] > 0
    assert made.tick(60_000) is False
    assert made.facts().predicted == made.facts().nodes == 0
