"""Where the blocks of a group lie in this rank's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import group_kernel_blocks

from infera_vllm.plan import GroupPlan, UnsupportedLayoutError
from kvd.client.copier import BlockCopier, CpuCopier, Segment
from kvd.client.device_copier import Device, DeviceCopier


def group_copiers(
    groups: tuple[GroupPlan, ...], shard: int, kv_caches: Mapping[str, Any], num_blocks: int
) -> dict[int, BlockCopier]:
    """A copier for each group, by its position, moving whole blocks of this rank.

    Raises:
        UnsupportedLayoutError: when the tensors are not as the plan says, or where nothing here can copy from.
    """
    device = _device_of(kv_caches)
    copiers: dict[int, BlockCopier] = {}
    for group in groups:
        parts = segments(kv_caches, group.layers, num_blocks)
        copier = CpuCopier(parts) if device is None else DeviceCopier(parts, device)
        expected_bytes = group.spec.shard_bytes[shard]
        if copier.object_bytes != expected_bytes:
            raise UnsupportedLayoutError(
                f"a block of group {group.position} has {copier.object_bytes} bytes here, "
                f"the scheduler expects {expected_bytes}"
            )
        copiers[group.position] = copier
    return copiers


def _device_of(kv_caches: Mapping[str, Any]) -> Device | None:
    """The GPU the cache is on; None for host memory."""
    kinds = {tensor.device.type for tensor in kv_caches.values()}
    if kinds <= {"cpu"}:
        return None
    if kinds != {"cuda"}:  # ROCm goes by this name too
        raise UnsupportedLayoutError(f"the cache is on {', '.join(sorted(kinds))}, which nothing here can copy from")
    from infera_vllm.device import TorchDevice

    try:
        return TorchDevice()
    except RuntimeError as error:
        raise UnsupportedLayoutError(str(error)) from error


def segments(kv_caches: Mapping[str, Any], layer_names: tuple[str, ...], num_blocks: int) -> list[Segment]:
    """The parts of a block, layer by layer in the order of the group.

    A layer's tensor is a [blocks, heads, tokens, content] view, blocks being the manager's. What of a block is not
    contiguous (heads in planes of their own) is a part for each head. Layers that share a tensor count once each:
    sharing within a group is refused, since saving the same bytes twice would hide a mistake in the plan.

    Raises:
        UnsupportedLayoutError: when a tensor is missing, or strided within a head.
    """
    found: list[Segment] = []
    for name in layer_names:
        tensor = kv_caches.get(name)
        if tensor is None:
            raise UnsupportedLayoutError(f"layer {name} has no cache tensor")
        if tensor.shape[0] % num_blocks:
            raise UnsupportedLayoutError(f"{name} has {tensor.shape[0]} kernel blocks for {num_blocks} blocks")
        found += _segments_of(name, group_kernel_blocks(tensor, num_blocks))
    if len({segment.address for segment in found}) != len(found):
        raise UnsupportedLayoutError("layers of one group share a cache tensor")
    return found


def _segments_of(name: str, blocks: Any) -> list[Segment]:
    item_bytes = blocks.element_size()
    stride_bytes = blocks.stride(0) * item_bytes
    block = blocks[0]
    if block.is_contiguous():
        return [Segment(blocks.data_ptr(), stride_bytes, block.numel() * item_bytes)]
    parts = [block[index] for index in range(block.shape[0])]
    if not all(part.is_contiguous() for part in parts):
        raise UnsupportedLayoutError(f"a head of {name} is not one contiguous run (strides {tuple(blocks.stride())})")
    return [Segment(part.data_ptr(), stride_bytes, part.numel() * item_bytes) for part in parts]
