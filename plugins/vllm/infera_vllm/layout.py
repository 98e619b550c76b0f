"""What a block of this engine consists of. Anything not understood exactly is refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infera_core.keys import GRAIN_TOKENS
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvd.client.copier import Segment


class UnsupportedLayoutError(Exception):
    """This model's cache is not one the connector can keep; the text says what about it."""


def check_engine(config: Any, kv_cache_config: Any) -> FullAttentionSpec:
    """The one attention spec of an engine whose blocks can be kept.

    Raises:
        UnsupportedLayoutError: for whatever is not plain full attention, in one group, on one
            pipeline stage.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedLayoutError(f"the model has {len(groups)} KV cache groups (hybrid attention)")
    if config.speculative_config is not None:
        raise UnsupportedLayoutError("speculative decoding is configured")
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise UnsupportedLayoutError("pipeline or context parallelism is configured")
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    # Exactly this type: its subclasses keep other things in a block.
    if any(type(layer) is not FullAttentionSpec for layer in specs):
        raise UnsupportedLayoutError(f"the cache is not plain full attention ({type(specs[0]).__name__})")
    if len({layer.page_size_bytes for layer in specs}) != 1:
        raise UnsupportedLayoutError("layers have pages of different sizes")
    first = specs[0]
    if first.sliding_window is not None or first.attention_chunk_size is not None:
        raise UnsupportedLayoutError("a sliding or chunked attention window is configured")
    if first.block_size % GRAIN_TOKENS:
        raise UnsupportedLayoutError(f"block size {first.block_size} is not a multiple of {GRAIN_TOKENS} tokens")
    return first


def block_bytes(kv_cache_config: Any, spec: FullAttentionSpec) -> int:
    """Bytes of one block on one rank, over all layers, as the scheduler can know it."""
    return int(spec.page_size_bytes) * len(kv_cache_config.kv_cache_groups[0].layer_names)


def segments(kv_caches: Mapping[str, Any], layer_names: list[str], num_blocks: int) -> list[Segment]:
    """One segment for each layer, in the order of the group.

    A layer's tensor is a [blocks, heads, tokens, content] view in which a block must be one
    contiguous run; the kernel may cut a block in several (dimension 0 is then a multiple).

    Raises:
        UnsupportedLayoutError: when a tensor is not like that, or not in host memory.
    """
    found: list[Segment] = []
    for name in layer_names:
        tensor = kv_caches.get(name)
        if tensor is None:
            raise UnsupportedLayoutError(f"layer {name} has no cache tensor")
        if tensor.device.type != "cpu":
            raise UnsupportedLayoutError(f"the cache is on {tensor.device}; this version copies host memory only")
        if tensor.shape[0] % num_blocks or not tensor[0].is_contiguous():
            raise UnsupportedLayoutError(
                f"a block of {name} is not one contiguous run (layout {tuple(tensor.stride())})"
            )
        parts = tensor.shape[0] // num_blocks
        size = tensor[0].numel() * tensor.element_size()
        stride = tensor.stride(0) * tensor.element_size()
        if parts > 1 and stride != size:
            raise UnsupportedLayoutError(f"kernel blocks of {name} do not lie together")
        found.append(Segment(tensor.data_ptr(), stride * parts, size * parts))
    if len({segment.address for segment in found}) != len(found):
        raise UnsupportedLayoutError("layers share one cache tensor")
    return found
