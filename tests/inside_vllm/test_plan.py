"""Which engines are served and how, and that all others are refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infera_vllm.hits import usable_tokens
from infera_vllm.plan import EnginePlan, Need, UnsupportedLayoutError, make_plan
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

VERSION = "0.32.0"


def spec(kind: Any = FullAttentionSpec, **fields: Any) -> Any:
    facts: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return kind(**(facts | fields))


def window(**fields: Any) -> Any:
    return spec(SlidingWindowSpec, **({"sliding_window": 128} | fields))


def engine(*specs: Any, replicas: int = 1, **changes: Any) -> tuple[Any, Any]:
    """A configuration; `changes` are to attributes of its parts, wherever they belong."""
    config = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=1
        ),
        model_config=SimpleNamespace(
            model="a-model", revision=None, dtype=torch.bfloat16, quantization=None, hf_overrides={},
            hf_text_config=SimpleNamespace(rope_parameters=None), served_model_name="m",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
    )  # fmt: skip
    groups = [KVCacheGroupSpec([f"g{n}.a", f"g{n}.b"], each) for n, each in enumerate(specs)]
    caches = SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC", kv_tp_replicas=replicas)
    parts = [config, config.parallel_config, config.model_config, config.cache_config, caches, groups[0]]
    for name, value in changes.items():
        (part,) = [part for part in parts if hasattr(part, name)]
        setattr(part, name, value)
    return config, caches


def plan_of(*specs: Any, **changes: Any) -> EnginePlan:
    return make_plan(*engine(*specs, **changes), VERSION)


def test_plain_full_attention() -> None:
    plan = plan_of(spec())
    (group,) = plan.groups
    assert (group.need, group.block_size_tokens, plan.align_tokens, plan.rank_count) == (Need.ALL, 32, 32, 1)
    assert group.spec.shard_bytes == (2 * 32 * 2 * 128 * 2,)


def test_a_hybrid_model_has_a_rule_for_each_group() -> None:
    plan = plan_of(spec(block_size=64), window(), spec(ChunkedLocalAttentionSpec, attention_chunk_size=96))
    assert [group.need for group in plan.groups] == [Need.ALL, Need.WINDOW, Need.CHUNK]
    assert plan.align_tokens == 64
    assert [group.spec.group for group in plan.groups] == [0, 1, 2]
    full, sliding, chunked = plan.groups
    assert full.first_needed_block(640) == 0
    # The token after 640 reads 127 tokens before it: from 513 on, which block 16 holds.
    assert sliding.first_needed_block(640) == 513 // 32
    assert sliding.first_needed_block(64) == 0
    assert chunked.first_needed_block(640) == 576 // 32


def test_layers_of_different_pages_in_one_group() -> None:
    small, large = spec(), spec(num_kv_heads=4)
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"g0.a": small, "g0.b": large})
    assert plan_of(uniform).groups[0].spec.shard_bytes == (small.page_size_bytes + large.page_size_bytes,)


def test_what_only_pads_a_page_is_not_kept() -> None:
    padded = spec(page_size_padded=32 * 2 * 128 * 2 + 4096)
    assert plan_of(padded).groups[0].spec.shard_bytes == plan_of(spec()).groups[0].spec.shard_bytes


def test_every_tensor_parallel_rank_has_its_shard() -> None:
    """A block served to every rank from the rank that wrote last: ranks are not one another."""
    plan = plan_of(spec(), tensor_parallel_size=4)
    assert [plan.shard_of(0, rank) for rank in range(4)] == [0, 1, 2, 3]
    assert all(plan.is_writer(rank) for rank in range(4))
    assert len(plan.groups[0].spec.shard_bytes) == plan.rank_count == 4


def test_what_all_ranks_hold_alike_is_written_once_and_read_by_all() -> None:
    latent = spec(MLAAttentionSpec, num_kv_heads=1, head_size=576)
    plan = plan_of(latent, tensor_parallel_size=4, replicas=4)
    assert [plan.shard_of(0, rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [plan.is_writer(rank) for rank in range(4)] == [True, False, False, False]
    assert (len(plan.groups[0].spec.shard_bytes), plan.rank_count) == (1, 4)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (engine(spec(), pipeline_parallel_size=2), "pipeline"),
        (engine(spec(), decode_context_parallel_size=2), "context"),
        (engine(spec(block_size=8)), "multiple of 16"),
        (engine(spec(tokens_per_state=4)), "cell"),
        (engine(window(extra_retained_tokens=2)), "extra tokens"),
        (engine(spec(), is_eagle_group=True), "draft"),
        (engine(spec(), host_resident=True), "host"),
        (engine(spec(), enable_kv_transfer=False), "replica"),
        (engine(spec(), calculate_kv_scales=True), "scales"),
        (engine(MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))), "MambaSpec"),
    ],
)
def test_everything_else_is_refused_in_words(made: tuple[Any, Any], word: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=word):
        make_plan(*made, VERSION)


def test_an_unknown_kind_of_cache_is_never_guessed() -> None:
    class Novel(FullAttentionSpec):
        """What a later version might bring."""

    with pytest.raises(UnsupportedLayoutError, match="Novel"):
        plan_of(spec(Novel))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_layout": "BLHNC"},
        {"dtype": torch.float16},
        {"cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        {"hf_overrides": {"a": 1}},
        {"model": "another-model"},
    ],
)
def test_vllm_55904_what_changes_the_bytes_changes_the_namespace(changes: dict[str, Any]) -> None:
    assert plan_of(spec(), **changes).namespace != plan_of(spec()).namespace


def test_lmcache_4463_a_new_engine_version_packs_otherwise() -> None:
    assert make_plan(*engine(spec()), "0.33.0").namespace != plan_of(spec()).namespace


def test_windows_and_block_sizes_are_part_of_the_name() -> None:
    found = [plan_of(one).namespace for one in (window(), window(sliding_window=64), window(block_size=64), spec())]
    assert len(set(found)) == 4


def test_the_name_is_the_same_for_the_same_engine_and_another_in_each_epoch() -> None:
    plan = plan_of(spec())
    assert plan.namespace == plan_of(spec()).namespace
    assert plan.namespace == plan_of(spec(), served_model_name="another name").namespace
    later = plan.in_epoch("a")
    assert len({plan.namespace, later.namespace, plan.in_epoch("b").namespace}) == 3
    assert later.in_epoch("a").namespace == later.namespace


def usable(plan: EnginePlan, present: list[set[int]], limit: int, computed: int = 0) -> int:
    def run(group: Any, first: int, end: int) -> int:
        blocks = present[group.position]
        return next((at - first for at in range(first, end) if at not in blocks), end - first)

    def each(group: Any, first: int, end: int) -> list[int]:
        return [int(at in present[group.position]) for at in range(first, end)]

    return usable_tokens(plan, computed, limit, run, each)


def test_llm_d_router_2362_a_window_counts_only_where_it_is_whole() -> None:
    plan = plan_of(spec(), window(sliding_window=65))
    everything = set(range(10))
    assert usable(plan, [everything, everything], 320) == 320
    assert usable(plan, [everything, {8, 9}], 320) == 320
    # Without the ninth block a hit must end before it, and needs the two before that.
    assert usable(plan, [everything, everything - {9}], 320) == 288
    assert usable(plan, [everything, {0, 1, 5, 9}], 320) == 64
    assert usable(plan, [everything, set()], 320) == 0
    assert usable(plan, [{0, 1, 2}, everything], 320) == 96
    assert usable(plan, [everything, everything], 319) == 288
    assert usable(plan, [everything, {9}], 320, computed=288) == 320
    assert usable(plan, [everything, set()], 320, computed=288) == 0


def test_the_search_for_a_usable_length_ends() -> None:
    plan = plan_of(window(sliding_window=65))
    present = [set(range(0, 4000, 2))]
    assert usable(plan, present, 32 * 4000) == 0
