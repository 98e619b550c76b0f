"""Where blocks lie in tensors, and that what is not whole blocks is refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infera_vllm.layout import group_copiers, segments
from infera_vllm.plan import UnsupportedLayoutError

from tests.inside_vllm.rig import make_plan


def round_trip(kv_caches: dict[str, Any], num_blocks: int, chosen: list[int]) -> None:
    """Saves some blocks, overwrites everything, loads them back: they are as before, and nothing else was touched."""
    from kvd.client.copier import CpuCopier

    copier = CpuCopier(segments(kv_caches, tuple(kv_caches), num_blocks))
    saved = torch.zeros(len(chosen), copier.object_bytes, dtype=torch.uint8)
    addresses = [saved[i].data_ptr() for i in range(len(chosen))]
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    sums = copier.save(chosen, addresses)
    for tensor in kv_caches.values():
        tensor.fill_(0)
    assert copier.load(chosen, addresses) == sums
    for name, tensor in kv_caches.items():
        parts = tensor.shape[0] // num_blocks
        rows = [block * parts + part for block in chosen for part in range(parts)]
        others = [row for row in range(tensor.shape[0]) if row not in rows]
        assert torch.equal(tensor[rows], before[name][rows])
        assert torch.count_nonzero(tensor[others]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_of_one_run(dtype: torch.dtype) -> None:
    round_trip({f"l{i}": filled(6, 2, 32, 16, dtype=dtype) for i in range(3)}, 6, [4, 1])


def test_layers_that_lie_inside_a_larger_block_row() -> None:
    """Block-outermost layouts: all layers of a block lie together, so a layer's blocks are far apart."""
    row = filled(6, 3, 2, 32, 16)
    round_trip({f"l{i}": row[:, i] for i in range(3)}, 6, [5, 0])


def test_heads_in_planes_of_their_own() -> None:
    """Some backends keep each head's plane over all blocks: a block is one run for each head."""
    planes = filled(2, 6, 32, 16)
    round_trip({"l": planes.permute(1, 0, 2, 3)}, 6, [3, 2])


def test_blocks_that_the_kernel_cuts_in_several() -> None:
    round_trip({"l": filled(12, 2, 16, 16)}, 6, [1, 4])


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randint(1, 100, shape).to(dtype)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({}, "no cache tensor"),
        ({"l": torch.zeros(8, 2, 32, 16).transpose(2, 3)}, "contiguous"),
        ({"l": torch.zeros(9, 2, 32, 16)}, "kernel blocks"),
    ],
)
def test_tensors_that_are_not_whole_blocks_are_refused(tensors: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=word):
        segments(tensors, ("l",), 8)


def test_a_device_that_nothing_here_copies_from_is_refused() -> None:
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="tpu"))
    with pytest.raises(UnsupportedLayoutError, match="tpu"):
        group_copiers((), 0, {"l": elsewhere}, 8)


def test_a_gpu_without_vllms_batched_copy_is_refused() -> None:
    """This build of vLLM is for CPUs: it has none."""
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(UnsupportedLayoutError, match="swap_blocks_batch"):
        group_copiers((), 0, {"l": elsewhere}, 8)


def test_layers_that_share_a_tensor_are_refused() -> None:
    shared = torch.zeros(8, 2, 32, 16)
    with pytest.raises(UnsupportedLayoutError, match="share"):
        segments({"a": shared, "b": shared}, ("a", "b"), 8)


def test_a_block_of_another_size_than_planned_is_refused() -> None:
    plan = make_plan([("a",)], 1)
    with pytest.raises(UnsupportedLayoutError, match="the scheduler expects"):
        group_copiers(plan.groups, 0, {"a": torch.zeros(8, 2, 32, 16)}, 8)
