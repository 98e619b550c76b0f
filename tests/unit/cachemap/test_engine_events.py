"""An engine's events in the map, one kind of event at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.interface import Target, Tier
from infera.cachemap.native_map import EngineDecoder, NativeCacheMap
from tests.support.engine_events import CLEARED, frame, removed, stored

TOKENS = list(range(1, 129))


class World:
    """One engine's events in a map, and a way to ask it."""

    def __init__(self, entry_limit: int = 4096, **more: Any) -> None:
        self.map = NativeCacheMap(entry_limit)
        self.holder = self.map.add_holder("w")
        self.index = EngineDecoder(self.map, self.holder, **more)

    def apply(self, *events: Any) -> None:
        assert self.index.apply(frame(*events))
        assert self.map.audit() is None

    @property
    def counters(self) -> Counter[str]:
        """What was counted, but for the frames themselves."""
        counted = self.map.counters("engine")
        del counted["frames"]
        return counted

    def hit(self, tokens: list[int], *, stride: int = 1, salt: bytes = b"", lora: bytes = b"") -> int:
        keys = chain_keys(root_key(salt=salt, lora=lora), tokens)
        return self.map.match(keys, [Target(stride, self.holder)])[0].total_tokens


def test_blocks_are_found_by_their_tokens_whatever_the_engine_calls_them() -> None:
    world = World()
    world.apply(stored([b"x" * 32, b"y" * 32], None, TOKENS[:32]), stored([77], b"y" * 32, TOKENS[32:48]))
    assert world.hit(TOKENS) == 48
    assert world.hit([*TOKENS[:40], 999]) == 32
    assert world.hit(TOKENS[1:]) == 0


@pytest.mark.parametrize("size", [16, 32, 64])
def test_wider_blocks_are_named_by_their_last_token(size: int) -> None:
    world = World()
    world.apply(stored([1, 2], None, TOKENS[: 2 * size], size))
    assert world.hit(TOKENS, stride=size // 16) == 2 * size
    assert world.index.block_size_tokens == size


def test_a_block_stored_twice_survives_one_removal() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), stored([1], None, TOKENS[:16]), removed([1]))
    assert world.hit(TOKENS) == 16
    world.apply(removed([1]))
    assert world.hit(TOKENS) == 0
    assert world.index.alias_count == 0
    world.apply(removed([1]))
    assert world.counters["removed_unknown"] == 1


def test_unknown_parents_are_counted_and_not_indexed() -> None:
    world = World()
    world.apply(stored([2], 1, TOKENS[16:32]))
    assert world.counters["unknown_parent"] == 1
    assert world.map.entry_count == 0


def test_a_single_string_on_the_first_block_is_the_salt() -> None:
    world = World()
    world.apply(stored([1, 2], None, TOKENS[:32], extra_keys=[["tenant"], None]))
    assert world.hit(TOKENS, salt=b"tenant") == 32
    assert world.hit(TOKENS) == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"lora_id": 3}, "lora"),
        ({"lora_name": "a"}, "lora"),
        ({"lora_name": "a", "extra_keys": [["salt"]]}, "lora"),
        ({"extra_keys": [["a", "b"]]}, "extra_keys"),
        ({"extra_keys": [[["image", 16]]]}, "extra_keys"),
        ({"extra_keys": [[["image", -1]]]}, "extra_keys"),
        ({"extra_keys": [[["image", 3, 4]]]}, "extra_keys"),
        ({"extra_keys": [[["", 3]]]}, "extra_keys"),
        ({"extra_keys": [[["image", 3.0]]]}, "extra_keys"),
        ({"extra_keys": [[["later", 9], ["earlier", 3]]]}, "extra_keys"),
        ({"extra_keys": [["salt", ["image", 3]]]}, "extra_keys"),
        ({"extra_keys": [[b"digest of prompt embeddings"]]}, "extra_keys"),
        ({"extra_keys": [[5]]}, "extra_keys"),
        ({"medium": "TAPE"}, "other_medium"),
        ({"locality": "REMOTE"}, "other_medium"),
        ({"token_ids": [-1] * 16}, "bad_token"),
    ],
)
def test_what_is_ambiguous_is_counted_and_not_indexed(more: dict[str, Any], reason: str) -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16], **more))
    assert world.map.entry_count == 0
    assert world.counters == {reason: 1}


def test_salt_on_a_later_block_is_not_guessed() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), stored([2], 1, TOKENS[16:32], extra_keys=[["x"]]))
    assert world.hit(TOKENS) == 16
    assert world.counters["extra_keys"] == 1


def test_cleared_forgets_everything() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), CLEARED)
    assert world.map.entry_count == 0
    assert world.index.alias_count == 0


def test_offloaded_blocks_are_another_tier() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), stored([1], None, TOKENS[:16], medium="CPU"), removed([1]))
    match = world.map.match(chain_keys(root_key(), TOKENS), [Target(1, world.holder)])[0]
    assert match.tokens_by_tier == {Tier.RAM: 16}


def test_one_name_for_two_prefixes_keeps_only_the_later_one() -> None:
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), stored([1], None, TOKENS[16:32]))
    assert world.hit(TOKENS) == 0
    assert world.hit(TOKENS[16:]) == 16
    assert world.counters["alias_changed"] == 1


def test_names_and_entries_are_bounded_and_removals_make_room() -> None:
    world = World(entry_limit=64)
    many = list(range(70 * 16))
    world.apply(stored(list(range(70)), None, many))
    assert world.map.entry_count == 64
    assert world.counters["refused_full"] == 6
    assert world.hit(many) == 64 * 16
    world.apply(removed([63]), stored([63], 62, many[63 * 16 : 64 * 16]))
    assert world.hit(many) == 64 * 16


def test_llm_d_router_2153_pages_below_the_grain_match() -> None:
    """llm-d-router#2153, #2274: pages below the index's grain never matched, and nobody was told."""
    world = World()
    world.apply(stored(list(range(100, 116)), None, TOKENS[:16], 1))
    assert world.hit(TOKENS) == 16
    assert world.counters == {"pages": 16, "stored": 1}


def test_llm_d_router_2362_sliding_window_groups_are_not_whole_prefixes() -> None:
    """llm-d-router#2362: sliding-window groups were credited as if they were whole prefixes."""
    world = World()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    names = list(range(1, 9))
    world.apply(stored(names, None, TOKENS, **full), stored(names, None, TOKENS, **window))
    assert world.hit(TOKENS) == 128
    world.apply(removed([1, 2, 3, 4, 5], group_idx=1))
    assert world.hit(TOKENS) == 128, "the window needs the last two blocks only"
    assert world.hit(TOKENS[:64]) == 0
    world.apply(removed([8], group_idx=1))
    assert world.hit(TOKENS) == 112
    world.apply(removed([6], group_idx=1))
    assert world.hit(TOKENS) == 0, "7 is there, 6 is not"
    world.apply(stored([6], 5, TOKENS[80:96], **window))
    assert world.hit(TOKENS) == 112, "the full group still knows what 6 follows"


@pytest.mark.parametrize("is_window_first", [True, False])
def test_blocks_that_a_window_does_not_keep_have_no_hash_and_cost_nothing(is_window_first: bool) -> None:
    """vLLM sends all tokens of a run and the hashes of what it keeps. That is no broken frame: one broken frame costs
    everything that is known of the rank. Its first group may be the one with the gaps."""
    world = World()
    full = {"group_idx": int(is_window_first), "kv_cache_spec_kind": "full_attention"}
    window = {
        "group_idx": int(not is_window_first), "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 33,
    }  # fmt: skip
    events = [stored(list(range(1, 9)), None, TOKENS, **full), stored([3, 4, 7, 8], None, TOKENS, **window)]
    world.apply(*(reversed(events) if is_window_first else events))
    assert world.hit(TOKENS) == 128
    assert world.hit(TOKENS[:112]) == 64, "6 is not kept"
    assert world.counters == {"stored": 12}
    world.apply(removed([8], group_idx=window["group_idx"]))
    assert world.hit(TOKENS) == 64


def test_a_sparse_block_that_no_group_knows_is_counted() -> None:
    """Also one that was known and is not any more, by the time its event is reached."""
    world = World()
    gaps = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    world.apply(stored([1], None, TOKENS[:16]), stored([2], None, TOKENS[:48], **gaps))
    assert world.counters == {"stored": 1, "unknown_place": 1}
    world.apply(removed([1]), stored([1], None, TOKENS[:48], **gaps))
    assert world.counters == {"stored": 1, "unknown_place": 2, "removed": 1}
    world.apply(stored([1], None, TOKENS[:48], **gaps), removed([1]), stored([1], None, TOKENS[:16]))
    assert world.counters == {"stored": 2, "unknown_place": 3, "removed": 1, "removed_unknown": 1}


@pytest.mark.parametrize(("count", "in_time"), [(256, 256), (257, 1)])
def test_the_sparse_events_that_wait_are_bounded(count: int, in_time: int) -> None:
    """Those that had to be applied before the others came are counted as not known."""
    world = World()
    gaps = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    many = list(range(count * 16))
    world.apply(*(stored([name], None, many, **gaps) for name in range(count)), stored(list(range(count)), None, many))
    assert world.counters["stored"] == count + in_time
    assert world.counters["unknown_place"] == count - in_time


def test_a_group_alone_with_a_window_is_matched_by_its_window() -> None:
    world = World()
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    world.apply(stored(list(range(1, 9)), None, TOKENS, **window), removed([1, 2, 3, 4, 5, 6]))
    assert world.hit(TOKENS) == 128
    assert world.hit(TOKENS[:96]) == 0


def test_mamba_needs_the_state_at_the_end_of_the_prefix() -> None:
    world = World()
    state = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    world.apply(stored([1, 2, 3, 4, 5, 6, 7, 8], None, TOKENS), stored([1, 2, 3, 4, 5, 6, 7, 8], None, TOKENS, **state))
    world.apply(removed([1, 2, 4, 5, 7, 8], group_idx=1))
    assert world.hit(TOKENS) == 6 * 16
    assert world.hit(TOKENS[: 5 * 16]) == 3 * 16


def test_a_group_whose_rule_is_not_known_is_taken_as_full_attention() -> None:
    world = World()
    odd = {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"}
    world.apply(stored([1, 2], None, TOKENS[:32]), stored([1], None, TOKENS[:16], **odd))
    assert world.counters["group_unknown"] == 1
    assert world.hit(TOKENS) == 16


def test_llm_d_router_2889_oversized_cpu_chunks_are_no_hbm_prefix() -> None:
    """llm-d-router#2889: chunks of many blocks in CPU memory were credited block by block."""
    world = World()
    world.apply(stored([1], None, TOKENS[:16]), stored([9], None, TOKENS[:64], 64, medium="CPU"))
    match = world.map.match(chain_keys(root_key(), TOKENS), [Target(1, world.holder)])[0]
    assert match.tokens_by_tier == {Tier.HBM: 16}
    assert world.index.block_size_tokens == 16


def test_a_loras_blocks_do_not_match_the_base_model() -> None:
    """A species of failures.md: a LoRA's blocks matched the base model."""
    world = World(adapters={"sql": b"digest of the weights"})
    keys = [["sql", "tenant"], ["sql"]]
    world.apply(stored([1, 2], None, TOKENS[:32], lora_id=1, lora_name="sql", extra_keys=keys))
    world.apply(stored([3], 2, TOKENS[32:48], lora_id=1, lora_name="sql", extra_keys=[["sql"]]))
    assert world.hit(TOKENS, salt=b"tenant", lora=b"digest of the weights") == 48
    assert world.hit(TOKENS) == world.hit(TOKENS, salt=b"tenant") == world.hit(TOKENS, lora=b"other") == 0
    world.apply(stored([5], None, TOKENS[:16], lora_name="unknown"))
    assert world.counters["lora"] == 1


def test_older_versions_send_arrays() -> None:
    world = World()
    event = ["BlockStored", [1, 2], None, TOKENS[:32], 16, None, "GPU", None, [["tenant"], None]]
    world.apply(event, ["BlockRemoved", [2], "GPU"])
    assert world.hit(TOKENS, salt=b"tenant") == 16
    world.apply(["AllBlocksCleared"], ["Unheard", 1, [2]])
    assert world.hit(TOKENS, salt=b"tenant") == 0
    assert world.counters["unknown_event"] == 1


def test_sglang_names_its_salt_and_its_pages_may_be_pairs() -> None:
    world = World(engine="sglang")
    pairs = [[token, token + 1] for token in TOKENS[:16]]
    event = stored([-(2**63) + 5, -7], None, pairs, 8, cache_salt="tenant")
    world.apply(event)
    assert world.hit(TOKENS, salt=b"tenant") == 16
    world.apply(["BlockStored", [1], None, TOKENS[:16], 16, None, "CPU_PINNED", "tenant"], removed([-7, -(2**63) + 5]))
    match = world.map.match(chain_keys(root_key(salt=b"tenant"), TOKENS), [Target(1, world.holder)])[0]
    assert match.tokens_by_tier == {Tier.RAM: 16}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pages_of_a_grain_leave_in_any_order_and_branches_share_them(size: int) -> None:
    world = World()
    count = 32 // size
    names = [1000 + number for number in range(count)]
    other = [*TOKENS[: 32 - size], *([9] * size)]
    world.apply(stored(names, None, TOKENS[:32], size))
    world.apply(stored([5000], names[-2], [9] * size, size))
    assert world.hit(TOKENS) == world.hit(other) == 32
    middle = 16 // size
    world.apply(removed([names[middle]]))
    assert world.hit(TOKENS) == world.hit(other) == (32 if middle == count else 16)
    world.apply(stored([names[middle]], names[middle - 1], TOKENS[16 : 16 + size], size))
    assert world.hit(TOKENS) == world.hit(other) == 32
    world.apply(removed([5000]))
    assert (world.hit(TOKENS), world.hit(other)) == (32, 16)
    world.apply(removed(names))
    assert world.map.entry_count == world.index.alias_count == 0
    assert world.map.facts().aliases == 0


def test_predictions_count_as_hbm_until_their_event_or_their_end() -> None:
    world = World()
    keys = chain_keys(root_key(), TOKENS)
    assert world.map.predict(world.holder, keys, now_ms=1000, life_ms=500) == 8
    assert world.hit(TOKENS) == 128
    assert world.map.entry_count == 0
    world.apply(stored([1, 2], None, TOKENS[:32]))
    world.map.tick(1501)
    assert world.hit(TOKENS) == 32
    assert world.counters == {"stored": 2, "predictions": 8, "predictions_confirmed": 2, "predictions_expired": 6}
    world.map.predict(world.holder, keys, now_ms=2000, life_ms=500)
    world.apply(removed([2]))
    world.index.reset()
    assert world.hit(TOKENS) == 0
    assert world.map.audit() is None


def test_a_gpu_eviction_does_not_erase_the_ram_copy() -> None:
    """A species of failures.md: a GPU eviction that also erased the CPU copy's entry."""
    world = World()
    world.apply(stored([1], None, TOKENS[:16], medium="CPU"), stored([1], None, TOKENS[:16]), removed([1]))
    assert world.map.blocks_by_tier(world.holder) == {Tier.RAM: 1}
