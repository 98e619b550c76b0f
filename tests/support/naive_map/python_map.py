"""The cache map in plain Python.

For every key one integer has a bit for each (holder, tier) that has the block, so one AND answers for all
workers at once. At the limit new blocks are refused and counted: the oldest entries are system prompts, the
most useful ones, and a refused entry only means that a hit is not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from infera_core.keys import GRAIN_TOKENS, KEY_BYTES

from infera.cachemap.interface import Match, Target, Tier

ENTRY_LIMIT_DEFAULT: Final = 4_000_000
_TIERS: Final = tuple(Tier)


@dataclass(slots=True)
class _Holder:
    name: str
    first_bit: int
    counts_copies: bool
    # One dict a tier: key -> how often it is stored.
    counts: tuple[dict[bytes, int], ...] = field(default_factory=lambda: tuple({} for _ in _TIERS))


class PythonCacheMap:
    """See CacheMap for the contract."""

    def __init__(self, entry_limit: int = ENTRY_LIMIT_DEFAULT) -> None:
        self._bits: dict[bytes, int] = {}
        self._holders: dict[int, _Holder] = {}
        self._free_bits: list[int] = []
        self._bits_made = 0
        self._handles_made = 0
        self._entry_count = 0
        self._entry_limit = entry_limit

    @property
    def entry_count(self) -> int:
        """Entries over all holders and tiers."""
        return self._entry_count

    @property
    def entry_limit(self) -> int:
        """New blocks are refused from here on."""
        return self._entry_limit

    def add_holder(self, name: str, *, counts_copies: bool = True) -> int:
        """A handle for a new, empty holder."""
        if self._free_bits:
            first_bit = self._free_bits.pop()
        else:
            first_bit = self._bits_made
            self._bits_made += len(_TIERS)
        self._handles_made += 1
        self._holders[self._handles_made] = _Holder(name, first_bit, counts_copies)
        return self._handles_made

    def drop_holder(self, holder: int) -> None:
        """Forget the holder and everything it held."""
        self.clear(holder)
        self._free_bits.append(self._holders.pop(holder).first_bit)

    def clear(self, holder: int) -> None:
        """Forget everything the holder held."""
        found = self._holders[holder]
        for tier in _TIERS:
            mask = ~(1 << (found.first_bit + tier))
            for key in found.counts[tier]:
                self._clear_bits(key, mask)
            self._entry_count -= len(found.counts[tier])
            found.counts[tier].clear()

    def store(self, holder: int, tier: Tier, keys: Iterable[bytes]) -> int:
        """Enter blocks; returns how many were refused at the limit."""
        found = self._holders[holder]
        counts = found.counts[tier]
        bit = 1 << (found.first_bit + tier)
        refused = 0
        for key in keys:
            count = counts.get(key, 0)
            if count == 0:
                if self._entry_count >= self._entry_limit:
                    refused += 1
                    continue
                self._entry_count += 1
                self._bits[key] = self._bits.get(key, 0) | bit
                counts[key] = 1
            elif found.counts_copies:
                counts[key] = count + 1
        return refused

    def remove(self, holder: int, tier: Tier, keys: Iterable[bytes]) -> int:
        """Take blocks out once; returns how many were unknown."""
        found = self._holders[holder]
        counts = found.counts[tier]
        mask = ~(1 << (found.first_bit + tier))
        unknown = 0
        for key in keys:
            count = counts.get(key, 0)
            if count == 0:
                unknown += 1
            elif count > 1:
                counts[key] = count - 1
            else:
                del counts[key]
                self._entry_count -= 1
                self._clear_bits(key, mask)
        return unknown

    def blocks_by_tier(self, holder: int) -> dict[Tier, int]:
        """Different blocks in each tier that has any."""
        counts = self._holders[holder].counts
        return {tier: len(counts[tier]) for tier in _TIERS if counts[tier]}

    def keys(self, holder: int, tier: Tier) -> list[bytes]:
        """What the holder has in a tier."""
        return list(self._holders[holder].counts[tier])

    def match(self, keys: bytes, targets: Sequence[Target]) -> list[Match]:
        """Longest usable prefix for every target, one walk for each block size."""
        walks: dict[int, _Walk] = {}
        return [self._match_one(keys, target, targets, walks) for target in targets]

    def _match_one(self, keys: bytes, target: Target, targets: Sequence[Target], walks: dict[int, _Walk]) -> Match:
        stride = target.stride_grains
        walk = walks.get(stride)
        if walk is None:
            interest = 0
            for other in targets:
                if other.stride_grains == stride:
                    interest |= self._mask(other, _TIERS)
            walk = walks[stride] = _Walk(self._read(keys, stride, interest))
        own = self._mask(Target(stride, target.own_holder), (Tier.HBM,))
        fast_blocks = walk.run_end(own, 0)
        tokens = {Tier.HBM: fast_blocks * stride * GRAIN_TOKENS} if fast_blocks else {}
        # An engine uses its own memory up to the first miss; what follows is loaded from below, never from HBM again.
        lower = [self._mask(target, (tier,)) for tier in _TIERS[1:]]
        end = walk.run_end(lower[0] | lower[1] | lower[2], fast_blocks)
        for entry in walk.entries[fast_blocks:end]:
            tier = next(tier for tier, mask in zip(_TIERS[1:], lower, strict=True) if entry & mask)
            tokens[tier] = tokens.get(tier, 0) + stride * GRAIN_TOKENS
        return Match(tokens)

    def _read(self, keys: bytes, stride: int, interest: int) -> list[int]:
        """Bits of the prompt's blocks, up to the first block that none of the targets has anywhere."""
        entries: list[int] = []
        step = stride * KEY_BYTES
        for end in range(step, len(keys) + 1, step):
            entry = self._bits.get(keys[end - KEY_BYTES : end], 0) & interest
            if not entry:
                break
            entries.append(entry)
        return entries

    def _mask(self, target: Target, tiers: Sequence[Tier]) -> int:
        mask = 0
        for holder in (target.own_holder, *target.shared_holders):
            if holder is not None:
                first = self._holders[holder].first_bit
                for tier in tiers:
                    mask |= 1 << (first + tier)
        return mask

    def _clear_bits(self, key: bytes, mask: int) -> None:
        left = self._bits[key] & mask
        if left:
            self._bits[key] = left
        else:
            del self._bits[key]


class _Walk:
    """The prompt's blocks for one block size, with the places where a given set of holders misses."""

    def __init__(self, entries: list[int]) -> None:
        self.entries = entries
        self._misses: dict[int, list[int]] = {}

    def run_end(self, mask: int, start: int) -> int:
        """First block at or after ``start`` that nobody in ``mask`` has."""
        misses = self._misses.get(mask)
        if misses is None:
            misses = [place for place, entry in enumerate(self.entries) if not entry & mask]
            self._misses[mask] = misses
        place = bisect_left(misses, start)
        return misses[place] if place < len(misses) else len(self.entries)
