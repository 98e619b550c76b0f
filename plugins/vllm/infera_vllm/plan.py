"""What is kept of this engine: its KV cache groups, what a hit needs of each, and the shards of its ranks.

A hit of L tokens is usable when every group has what it needs at L (`Need`): full attention every block up to L, a
sliding window the blocks covering the window before L. All groups' block sizes divide the hit's length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from infera_core.keys import GRAIN_TOKENS
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from infera_vllm.namespace import namespace_facts
from kvd.client.client import RecordSpec
from kvd.client.namespace import fingerprint


class UnsupportedLayoutError(Exception):
    """This model's cache is not one the connector can keep; the text says what about it."""


class Need(Enum):
    """Which blocks of a group a hit needs."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"


@dataclass(frozen=True)
class GroupPlan:
    """One group. ``position`` is its index in vLLM's tuples of block tables; ``span_tokens`` the size of its window or
    chunk (0 for ALL). ``layers`` are the names whose tensors hold its blocks."""

    position: int
    need: Need
    block_size_tokens: int
    span_tokens: int
    layers: tuple[str, ...]
    spec: RecordSpec

    def first_needed_block(self, hit_tokens: int) -> int:
        """The first block that the token after a hit of ``hit_tokens`` reads, or one after it."""
        if self.need is Need.ALL:
            return 0
        if self.need is Need.WINDOW:
            first_token = hit_tokens - self.span_tokens + 1
        else:
            first_token = hit_tokens // self.span_tokens * self.span_tokens
        return max(0, first_token) // self.block_size_tokens


@dataclass(frozen=True)
class EnginePlan:
    """All groups. ``rank_count`` worker processes take part; ``align_tokens`` divides the length of every hit."""

    groups: tuple[GroupPlan, ...]
    align_tokens: int
    rank_count: int
    facts: dict[str, object]
    """What the namespace is a fingerprint of."""
    tensor_parallel: int
    replicas: int
    """Consecutive tensor-parallel ranks that hold the same bytes (MLA): they share a shard."""

    @property
    def namespace(self) -> bytes:
        """The 16 bytes under which this engine's blocks are kept."""
        return self.groups[0].spec.namespace

    @property
    def specs(self) -> list[RecordSpec]:
        """What kvd must know of."""
        return [group.spec for group in self.groups]

    def described(self) -> str:
        """The groups in words, for a reader who wonders what is kept."""
        return "; ".join(
            f"{group.need.value}{f' of {group.span_tokens} tokens' if group.span_tokens else ''}"
            f" in blocks of {group.block_size_tokens} tokens"
            for group in self.groups
        )

    def shard_of(self, pipeline_rank: int, tensor_rank: int) -> int:
        """The shard that a rank loads."""
        shards_per_stage = self.tensor_parallel // self.replicas
        return pipeline_rank * shards_per_stage + tensor_rank // self.replicas

    def is_writer(self, tensor_rank: int) -> bool:
        """Whether the rank is the one of its replicas that saves their shard."""
        return tensor_rank % self.replicas == 0

    def in_epoch(self, epoch: str) -> EnginePlan:
        """The plan after the model's weights were changed at run time: the same but for the namespace."""
        namespace = fingerprint({**self.facts, "epoch": epoch})
        groups = tuple(replace(g, spec=replace(g.spec, namespace=namespace)) for g in self.groups)
        return replace(self, groups=groups)


def make_plan(config: Any, kv_cache_config: Any, version: str) -> EnginePlan:
    """The plan of an engine, the same in its scheduler and in all its workers.

    Raises:
        UnsupportedLayoutError: for whatever is not understood exactly.
    """
    _check_parallelism(config)
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedLayoutError("fp8 scales are computed at run time and are not in the blocks")
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        if group.host_resident or not group.enable_kv_transfer:
            raise UnsupportedLayoutError("a cache group lives in host memory or is a replica of another")
        if group.is_eagle_group:
            raise UnsupportedLayoutError("a draft model keeps a cache of its own (EAGLE, MTP)")
    needs = [_need_of(group) for group in groups]
    parallel = config.parallel_config
    tensor_parallel, stages = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    replicas = int(kv_cache_config.kv_tp_replicas) if tensor_parallel > 1 else 1
    shard_count = stages * (tensor_parallel // replicas)
    facts = namespace_facts(config, kv_cache_config, version)
    namespace = fingerprint(facts)
    model = str(config.model_config.served_model_name)
    plans = []
    for position, (group, (need, span_tokens)) in enumerate(zip(groups, needs, strict=True)):
        size_bytes = _group_bytes(group)
        spec = RecordSpec(namespace, position, (size_bytes,) * shard_count, model)
        block_size = int(group.kv_cache_spec.block_size)
        plans.append(GroupPlan(position, need, block_size, span_tokens, tuple(group.layer_names), spec))
    align_tokens = math.lcm(*(plan.block_size_tokens for plan in plans))
    return EnginePlan(tuple(plans), align_tokens, stages * tensor_parallel, facts, tensor_parallel, replicas)


def _check_parallelism(config: Any) -> None:
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedLayoutError("context parallelism is configured: a block's tokens are spread over ranks")
    if parallel.pipeline_parallel_size > 1:
        # The scheduler knows the layers of all stages, but not which of them lie where.
        raise UnsupportedLayoutError("pipeline parallelism is configured")


def layer_specs(group: Any) -> list[Any]:
    """The spec of each layer, in the order of the group's layer names."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec] * len(group.layer_names)


def _group_bytes(group: Any) -> int:
    """Bytes of one block over all layers of the group, on one rank, without what only pads a page."""
    return sum(int(spec.unpadded_page_size_bytes) for spec in layer_specs(group))


def _need_of(group: Any) -> tuple[Need, int]:
    found = {_need_of_layer(spec) for spec in layer_specs(group)}
    if len(found) != 1:
        raise UnsupportedLayoutError("layers of one cache group need different blocks")
    block_size = int(group.kv_cache_spec.block_size)
    if block_size % GRAIN_TOKENS:
        raise UnsupportedLayoutError(f"block size {block_size} is not a multiple of {GRAIN_TOKENS} tokens")
    return found.pop()


def _need_of_layer(spec: Any) -> tuple[Need, int]:
    # Exactly these types: their subclasses keep other things in a block.
    kind = type(spec)
    if kind not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec):
        raise UnsupportedLayoutError(f"the cache of a layer is of a kind that is not kept ({kind.__name__})")
    if spec.tokens_per_state != 1:
        raise UnsupportedLayoutError("a cache cell stands for more or less than one token")
    if kind is SlidingWindowSpec:
        if spec.extra_retained_tokens:
            raise UnsupportedLayoutError("a sliding window retains extra tokens for speculative decoding")
        return Need.WINDOW, int(spec.sliding_window)
    if kind is ChunkedLocalAttentionSpec:
        return Need.CHUNK, int(spec.attention_chunk_size)
    # A window noted on full attention narrows what is read, not what is kept.
    return Need.ALL, 0
