"""The map against a naive model that keeps plain sets and walks every target by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from infera_core.keys import GRAIN_TOKENS, KEY_BYTES

from infera.cachemap.interface import Match, Target, Tier
from infera.cachemap.python_map import PythonCacheMap

KEYS = [bytes([number]) * KEY_BYTES for number in range(12)]
PROMPT = b"".join(KEYS)


class NaiveMap:
    """What the map means, without any cleverness."""

    def __init__(self) -> None:
        self.held: Counter[tuple[int, Tier, bytes]] = Counter()

    def match(self, keys: bytes, target: Target) -> dict[Tier, int]:
        step = target.stride_grains * KEY_BYTES
        blocks = [keys[end - KEY_BYTES : end] for end in range(step, len(keys) + 1, step)]
        found: dict[Tier, int] = {}
        is_fast = True
        for key in blocks:
            tiers = [
                tier
                for tier in Tier
                for holder in (target.own_holder, *target.shared_holders)
                if holder is not None and self.held[holder, tier, key] > 0
                if tier is not Tier.HBM or holder == target.own_holder
            ]
            is_fast = is_fast and Tier.HBM in tiers
            usable = [Tier.HBM] if is_fast else [tier for tier in tiers if tier is not Tier.HBM]
            if not usable:
                break
            found[usable[0]] = found.get(usable[0], 0) + target.stride_grains * GRAIN_TOKENS
        return found


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear"]),
        st.integers(0, 3),
        st.sampled_from(list(Tier)),
        st.lists(st.sampled_from(KEYS), max_size=12),
    ),
    max_size=40,
)


@given(operations)
def test_map_equals_the_naive_model(steps: list[tuple[str, int, Tier, list[bytes]]]) -> None:
    real, naive = PythonCacheMap(), NaiveMap()
    holders = [real.add_holder(str(number)) for number in range(4)]
    targets = [
        Target(1, holders[0], (holders[3],)),
        Target(2, holders[1], (holders[3],)),
        Target(1, holders[2]),
        Target(4, None, (holders[3],)),
    ]
    for action, place, tier, keys in steps:
        holder = holders[place]
        if action == "store":
            assert real.store(holder, tier, keys) == 0
            naive.held.update((holder, tier, key) for key in keys)
        elif action == "remove":
            for key in keys:
                unknown = real.remove(holder, tier, [key])
                assert unknown == (naive.held[holder, tier, key] == 0)
                naive.held[holder, tier, key] = max(0, naive.held[holder, tier, key] - 1)
        else:
            real.clear(holder)
            for entry in [entry for entry in naive.held if entry[0] == holder]:
                del naive.held[entry]
    assert [match.tokens_by_tier for match in real.match(PROMPT, targets)] == [
        naive.match(PROMPT, target) for target in targets
    ]
    assert real.entry_count == sum(1 for count in naive.held.values() if count > 0)


def test_a_missing_grain_between_does_not_end_a_wider_workers_match() -> None:
    made = PythonCacheMap()
    holder = made.add_holder("w")
    made.store(holder, Tier.HBM, [KEYS[1], KEYS[3]])
    wide, narrow = made.match(PROMPT, [Target(2, holder), Target(1, holder)])
    assert wide.total_tokens == 64
    assert narrow.total_tokens == 0


def test_hbm_behind_a_gap_is_not_used_but_lower_tiers_are() -> None:
    made = PythonCacheMap()
    own, kvd = made.add_holder("w"), made.add_holder("kvd", counts_copies=False)
    made.store(own, Tier.HBM, [KEYS[0], KEYS[2]])
    made.store(kvd, Tier.RAM, [KEYS[0], KEYS[1]])
    assert made.match(PROMPT, [Target(1, own, (kvd,))]) == [Match({Tier.HBM: 16, Tier.RAM: 16})]


def test_dropping_a_holder_leaves_nothing_and_its_place_is_used_again() -> None:
    made = PythonCacheMap()
    for _ in range(50):
        holder = made.add_holder("w")
        made.store(holder, Tier.HBM, KEYS)
        made.drop_holder(holder)
    assert made.entry_count == 0
    fresh = made.add_holder("w")
    assert made.match(PROMPT, [Target(1, fresh)]) == [Match()]
    assert made._bits_made == len(Tier)


def test_without_counting_copies_one_removal_is_enough() -> None:
    made = PythonCacheMap()
    holder = made.add_holder("kvd", counts_copies=False)
    made.store(holder, Tier.RAM, [KEYS[0], KEYS[0]])
    made.remove(holder, Tier.RAM, [KEYS[0]])
    assert made.entry_count == 0


def test_at_the_limit_new_blocks_are_refused_and_removals_make_room() -> None:
    made = PythonCacheMap(entry_limit=3)
    holder = made.add_holder("w")
    assert made.store(holder, Tier.HBM, KEYS[:5]) == 2
    assert made.store(holder, Tier.HBM, KEYS[:1]) == 0, "a copy of what is there needs no room"
    assert made.blocks_by_tier(holder) == {Tier.HBM: 3}
    made.remove(holder, Tier.HBM, [KEYS[2]])
    assert made.store(holder, Tier.HBM, [KEYS[4]]) == 0


def test_dynamo_10774_an_index_that_never_freed() -> None:
    """dynamo#10774: 20 GB an hour. What is stored and removed leaves nothing behind."""
    made = PythonCacheMap()
    holder = made.add_holder("w")
    for number in range(20_000):
        key = number.to_bytes(KEY_BYTES, "big")
        made.store(holder, Tier.HBM, [key])
        made.remove(holder, Tier.HBM, [key])
    assert made.entry_count == 0
    assert not made._bits
    assert not any(made._holders[holder].counts)
