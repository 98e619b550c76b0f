"""Turns one engine rank's events into entries of the cache map.

An engine names blocks by hashes of its own. They are only aliases here: each maps to the content key of the
prefix it ends, computed from the tokens in the event, so engines, versions and hash seeds do not matter.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Final

from infera_core.keys import GRAIN_TOKENS, KEY_BYTES, chain_keys, root_key

from infera.cachemap.interface import CacheMap, Tier
from tests.support.naive_map.events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineHash,
    UnknownEvent,
)

ALIASES_MAX_DEFAULT: Final = 2_000_000
_TIERS_BY_MEDIUM: Final = {None: Tier.HBM, "GPU": Tier.HBM, "CPU": Tier.RAM, "CPU_PINNED": Tier.RAM, "DISK": Tier.DISK}
# A prefix is whole only where full attention has every block; other groups follow rules of their own.
_FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


@dataclass(slots=True)
class _Alias:
    key: bytes
    count: int


class EngineIndex:
    """One engine rank's part of the map. ``counters`` says what was indexed and what was left out, and why."""

    def __init__(
        self, cache_map: CacheMap, holder: int, counters: Counter[str], aliases_max: int = ALIASES_MAX_DEFAULT
    ) -> None:
        self._map = cache_map
        self._holder = holder
        self._aliases: dict[tuple[Tier, EngineHash], _Alias] = {}
        self._aliases_max = aliases_max
        self._group: int | None = None
        self.counters = counters
        self.block_size_tokens: int | None = None

    @property
    def alias_count(self) -> int:
        """Engine hashes known at the moment."""
        return len(self._aliases)

    def reset(self) -> None:
        """Forget all: what this engine holds is no longer known."""
        self._map.clear(self._holder)
        self._aliases.clear()

    def apply(self, batch: EngineBatch) -> None:
        """Enter a batch, in order."""
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self._stored(event)
            elif isinstance(event, BlocksRemoved):
                self._removed(event)
            elif isinstance(event, AllCleared):
                self.counters["cleared"] += 1
                self.reset()
            elif isinstance(event, UnknownEvent):
                self.counters["unknown_event"] += 1

    def _stored(self, event: BlocksStored) -> None:
        tier = _TIERS_BY_MEDIUM.get(event.medium)
        reason = self._why_not(event, tier)
        parent = None if reason else self._parent_key(event, tier or Tier.HBM)
        if reason or parent is None or tier is None:
            self.counters[reason or "unknown_parent"] += len(event.hashes)
            return
        self.block_size_tokens = event.block_size_tokens
        chain = chain_keys(parent, array("I", event.tokens))
        step = event.block_size_tokens // GRAIN_TOKENS * KEY_BYTES
        keys = [chain[end - KEY_BYTES : end] for end in range(step, len(chain) + 1, step)]
        self._enter(tier, event.hashes, keys)

    def _enter(self, tier: Tier, hashes: tuple[EngineHash, ...], keys: list[bytes]) -> None:
        for engine_hash, key in zip(hashes, keys, strict=True):
            alias = self._aliases.get((tier, engine_hash))
            if alias is not None and alias.key != key:
                # The engine gave one name to two prefixes; which one it still has cannot be told.
                self._map.remove(self._holder, tier, [alias.key] * alias.count)
                del self._aliases[tier, engine_hash]
                self.counters["alias_changed"] += 1
                alias = None
            if alias is None and len(self._aliases) >= self._aliases_max:
                self.counters["refused_full"] += 1
                continue
            if self._map.store(self._holder, tier, (key,)):
                self.counters["refused_full"] += 1
                continue
            self.counters["stored"] += 1
            if alias is None:
                self._aliases[tier, engine_hash] = _Alias(key, 1)
            else:
                alias.count += 1

    def _removed(self, event: BlocksRemoved) -> None:
        tier = _TIERS_BY_MEDIUM.get(event.medium)
        if tier is None or event.group != (self._group or 0):
            self.counters["other_medium" if tier is None else "other_group"] += len(event.hashes)
            return
        for engine_hash in event.hashes:
            alias = self._aliases.get((tier, engine_hash))
            if alias is None:
                self.counters["removed_unknown"] += 1
                continue
            self._map.remove(self._holder, tier, (alias.key,))
            self.counters["removed"] += 1
            alias.count -= 1
            if alias.count == 0:
                del self._aliases[tier, engine_hash]

    def _why_not(self, event: BlocksStored, tier: Tier | None) -> str | None:
        """Why an event is not indexed; None when it is."""
        if tier is None:
            return "other_medium"
        if event.has_lora:
            return "lora"
        if event.group_kind not in _FULL_ATTENTION or (self._group is not None and event.group != self._group):
            return "other_group"
        if event.block_size_tokens % GRAIN_TOKENS:
            return "block_size_below_grain"
        if any(token < 0 or token > 0xFFFFFFFF for token in event.tokens):
            return "bad_token"
        if not _is_plain_or_salted(event):
            return "extra_keys"
        self._group = event.group
        return None

    def _parent_key(self, event: BlocksStored, tier: Tier) -> bytes | None:
        """The key the chain goes on from; None when it is not known."""
        if event.parent is not None:
            alias = self._aliases.get((tier, event.parent))
            if alias is None and tier is not Tier.HBM:
                alias = self._aliases.get((Tier.HBM, event.parent))
            return None if alias is None else alias.key
        return root_key(salt=_salt(event))


def _is_plain_or_salted(event: BlocksStored) -> bool:
    """Engines do not say what an extra key is. One string on the very first block is the salt; else we do not guess."""
    if not event.extra_keys or not any(event.extra_keys):
        return True
    first = event.extra_keys[0]
    return (
        event.parent is None
        and not any(event.extra_keys[1:])
        and isinstance(first, list)
        and len(first) == 1
        and isinstance(first[0], str)
    )


def _salt(event: BlocksStored) -> bytes:
    first = event.extra_keys[0] if event.extra_keys else None
    return str(first[0]).encode() if isinstance(first, list) and first else b""
