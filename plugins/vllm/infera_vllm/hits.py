"""How much of a prompt can be loaded: the longest length at which every group has what it needs.

Groups that need every block bound the length by their run. From there down, a length is tried; where a window's group
misses a block, no length that still needs this block can be usable, so the next one tried ends before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from infera_vllm.plan import EnginePlan, GroupPlan, Need

TRIES_MAX: Final = 64
"""Lengths tried for one prompt; a cache so full of holes is not worth a longer search in the scheduler."""

Run = Callable[[GroupPlan, int, int], int]
"""(group, first block, end): how many of these blocks are present, from the first on without a gap."""
Present = Callable[[GroupPlan, int, int], Sequence[int]]
"""(group, first block, end): one number for each block, 0 for what is absent."""


def usable_tokens(plan: EnginePlan, computed_tokens: int, limit_tokens: int, run: Run, present: Present) -> int:
    """The longest usable length above `computed_tokens` and up to `limit_tokens`; 0 when there is none.

    What the engine has computed itself it holds in every group.
    """
    length = limit_tokens // plan.align_tokens * plan.align_tokens
    for group in plan.groups:
        if group.need is Need.ALL and length > computed_tokens:
            first, end = computed_tokens // group.block_size_tokens, length // group.block_size_tokens
            length = (first + run(group, first, end)) * group.block_size_tokens
            length -= length % plan.align_tokens
    for _ in range(TRIES_MAX):
        if length <= computed_tokens:
            return 0
        shorter = _end_before_a_gap(plan, computed_tokens, length, present)
        if shorter == length:
            return length
        length = shorter - shorter % plan.align_tokens
    return 0


def _end_before_a_gap(plan: EnginePlan, computed_tokens: int, length: int, present: Present) -> int:
    """`length` when no window misses a block; else the start of the last missing one."""
    for group in plan.groups:
        if group.need is Need.ALL:
            continue
        first, end = blocks_to_load(group, computed_tokens, length)
        found = present(group, first, end)
        for block in range(end - 1, first - 1, -1):
            if not found[block - first]:
                return block * group.block_size_tokens
    return length


def blocks_to_load(group: GroupPlan, computed_tokens: int, hit_tokens: int) -> tuple[int, int]:
    """The first block of a group that a hit has to bring, and the end."""
    size = group.block_size_tokens
    first = max(computed_tokens // size, group.first_needed_block(hit_tokens))
    return min(first, hit_tokens // size), hit_tokens // size
