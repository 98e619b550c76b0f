from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.engine_index import EngineIndex
from infera.cachemap.interface import Target, Tier
from infera.cachemap.python_map import PythonCacheMap
from infera.cachemap.vllm_events import decode_vllm_batch
from tests.support.engine_events import CLEARED, frame, removed, stored

TOKENS = list(range(1, 129))


class World:
    """One engine's index and a way to ask it."""

    def __init__(self, **limits: int) -> None:
        self.map = PythonCacheMap()
        self.holder = self.map.add_holder("w")
        self.counters: Counter[str] = Counter()
        self.index = EngineIndex(self.map, self.holder, self.counters, **limits)

    def apply(self, *events: Any) -> None:
        self.index.apply(decode_vllm_batch(frame(*events)))

    def hit(self, tokens: list[int], *, stride: int = 1, salt: bytes = b"") -> int:
        keys = chain_keys(root_key(salt=salt), tokens)
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
        ({"extra_keys": [[["image", 3]]]}, "extra_keys"),
        ({"extra_keys": [[5]]}, "extra_keys"),
        ({"medium": "TAPE"}, "other_medium"),
        ({"kv_cache_spec_kind": "sliding_window"}, "other_group"),
        ({"kv_cache_spec_kind": "mamba"}, "other_group"),
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


def test_names_are_bounded() -> None:
    world = World(aliases_max=2)
    world.apply(stored([1, 2, 3], None, TOKENS[:48]))
    assert world.index.alias_count == 2
    assert world.counters["refused_full"] == 1
    assert world.hit(TOKENS) == 32


def test_llm_d_router_2153_page_size_below_the_grain_is_said_not_silent() -> None:
    """llm-d-router#2153, #2274: pages below the index's grain never matched, and nobody was told."""
    world = World()
    world.apply(stored([1, 2], None, TOKENS[:16], 8))
    assert world.counters == {"block_size_below_grain": 2}


def test_llm_d_router_2362_sliding_window_groups_are_not_reusable_prefixes() -> None:
    """llm-d-router#2362: sliding-window groups were credited as if they were whole prefixes."""
    world = World()
    world.apply(
        stored([1], None, TOKENS[:16], group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored([1], None, TOKENS[:16], group_idx=0, kv_cache_spec_kind="full_attention"),
        removed([1], group_idx=1),
    )
    assert world.hit(TOKENS) == 16


def test_a_gpu_eviction_does_not_erase_the_ram_copy() -> None:
    """A species of failures.md: a GPU eviction that also erased the CPU copy's entry."""
    world = World()
    world.apply(stored([1], None, TOKENS[:16], medium="CPU"), stored([1], None, TOKENS[:16]), removed([1]))
    assert world.map.blocks_by_tier(world.holder) == {Tier.RAM: 1}
