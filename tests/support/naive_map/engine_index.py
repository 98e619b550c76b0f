"""Turns one engine rank's events into entries of the cache map.

An engine names blocks by hashes of its own. They are only aliases here: each maps to the content key of the
prefix it ends, computed from the tokens in the event, so engines, versions and hash seeds do not matter.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from infera_core.keys import (
    GRAIN_TOKENS,
    IDENTITY_BYTES_MAX,
    KEY_BYTES,
    chain_keys,
    extra_key,
    image_extra,
    root_key,
)

from infera.cachemap.interface import CacheMap, Tier
from tests.support.naive_map.events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    EngineHash,
    UnknownEvent,
)

ALIASES_MAX_DEFAULT: Final = 2_000_000
IMAGES_MAX: Final = 1024
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
        self,
        cache_map: CacheMap,
        holder: int,
        counters: Counter[str],
        aliases_max: int = ALIASES_MAX_DEFAULT,
        adapters: Mapping[str, bytes] | None = None,
    ) -> None:
        self.adapters = dict(adapters or {})
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
        """Enter a batch, in order; but sparse events after the other stored blocks around them."""
        for event in in_order(batch.events):
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
        if reason is None and tier is not None and is_sparse(event):
            self._enter_sparse(event, tier)
            return
        parent = None if reason else self._parent_key(event, tier or Tier.HBM)
        if reason or parent is None or tier is None:
            self.counters[reason or "unknown_parent"] += len(event.hashes)
            return
        self.block_size_tokens = event.block_size_tokens
        chain = chain_with_images(parent, event.tokens, read_extras(event).images)
        step = event.block_size_tokens // GRAIN_TOKENS * KEY_BYTES
        keys = [chain[end - KEY_BYTES : end] for end in range(step, len(chain) + 1, step)]
        self._enter(tier, event.hashes, keys)

    def _enter_sparse(self, event: BlocksStored, tier: Tier) -> None:
        self.block_size_tokens = event.block_size_tokens
        for engine_hash in event.hashes:
            alias = self._aliases.get((tier, engine_hash)) or self._aliases.get((Tier.HBM, engine_hash))
            if alias is None:
                self.counters["unknown_place"] += 1
            else:
                self._enter(tier, (engine_hash,), [alias.key])

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
        if event.has_lora and event.lora_name not in self.adapters:
            return "lora"
        if event.group_kind not in _FULL_ATTENTION or (self._group is not None and event.group != self._group):
            return "other_group"
        if event.block_size_tokens % GRAIN_TOKENS:
            return "block_size_below_grain"
        if any(token < 0 or token > 0xFFFFFFFF for token in event.tokens):
            return "bad_token"
        if is_sparse(event):
            self._group = event.group
            return None
        try:
            salt = read_extras(event).salt
        except ExtraKeysError as error:
            return error.counter
        if len((salt or "").encode()) > IDENTITY_BYTES_MAX:
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
        lora = b"" if event.lora_name is None else self.adapters[event.lora_name]
        return root_key(salt=(read_extras(event).salt or "").encode(), lora=lora)


def is_sparse(event: BlocksStored) -> bool:
    """Whether it has tokens of more blocks than it names."""
    return len(event.tokens) > len(event.hashes) * event.block_size_tokens


def in_order(events: tuple[EngineEvent, ...]) -> list[EngineEvent]:
    """Sparse events last in every run of stored blocks."""
    found: list[EngineEvent] = []
    for are_stored, run in groupby(events, lambda event: isinstance(event, BlocksStored)):
        entries = list(run)
        if are_stored:
            entries.sort(key=lambda event: isinstance(event, BlocksStored) and is_sparse(event))
        found += entries
    return found


@dataclass(slots=True)
class Extras:
    """What an event says of its tokens beside themselves. ``images``: (first token in the event, identifier)."""

    salt: str | None = None
    images: list[tuple[int, str]] = field(default_factory=list)


class ExtraKeysError(Exception):
    """Extra keys that cannot be told apart; ``counter`` is where they are counted."""

    def __init__(self, counter: str) -> None:
        super().__init__(counter)
        self.counter = counter


def read_extras(event: BlocksStored) -> Extras:
    """The salt and the images that begin in an event's blocks. Raises ExtraKeysError."""
    extras = Extras()
    for block, entry in enumerate(event.extra_keys or ()):
        if entry is None:
            continue
        if not isinstance(entry, list):
            raise ExtraKeysError("extra_keys")
        keys = entry[1:] if entry and event.lora_name is not None and entry[0] == event.lora_name else entry
        for place, key in enumerate(keys):
            if isinstance(key, str):
                if place != len(keys) - 1 or block or event.parent is not None:
                    raise ExtraKeysError("extra_keys")
                extras.salt = key
            else:
                _add_image(extras, event, block, key)
    return extras


def _add_image(extras: Extras, event: BlocksStored, block: int, key: object) -> None:
    if not isinstance(key, list) or len(key) != 2 or not isinstance(key[0], str) or type(key[1]) is not int:
        raise ExtraKeysError("extra_keys")
    identifier, offset = key
    if not 0 < len(identifier.encode()) <= IDENTITY_BYTES_MAX or offset >= event.block_size_tokens:
        raise ExtraKeysError("extra_keys")
    if offset < 0:
        if block == 0 and event.parent is None:
            raise ExtraKeysError("extra_keys")
        return
    token = block * event.block_size_tokens + offset
    if extras.images and extras.images[-1][0] > token:
        raise ExtraKeysError("extra_keys")
    if len(extras.images) == IMAGES_MAX:
        raise ExtraKeysError("images_over_limit")
    extras.images.append((token, identifier))


def chain_with_images(parent: bytes, tokens: tuple[int, ...], images: list[tuple[int, str]]) -> bytes:
    """The keys of all grains, one after the other, an image mixed in where it begins."""
    keys = b""
    for start in range(0, len(tokens), GRAIN_TOKENS):
        begun = [
            image_extra(name.encode(), token - start) for token, name in images if 0 <= token - start < GRAIN_TOKENS
        ]
        parent = extra_key(parent, b"".join(begun)) if begun else parent
        parent = chain_keys(parent, array("I", tokens[start : start + GRAIN_TOKENS]))
        keys += parent
    return keys
