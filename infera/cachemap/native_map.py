"""The cache map in C: one writer, any number of readers of the same memory.

The memory has no name: it is handed on as a descriptor, so that nothing is left behind when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, Final

from infera_core import ffi, lib
from infera_core.keys import GRAIN_TOKENS, KEY_BYTES

from infera.cachemap.interface import Match, Target, Tier

ENTRY_LIMIT_DEFAULT: Final = 4_000_000
PREDICTION_LIFE_MS: Final = 10_000
"""All predictions live as long, because they end in the order they were made."""

ADAPTER_NAME_BYTES_MAX: Final = 512
ADAPTER_DIGEST_BYTES_MAX: Final = 128

# In the order of enum cachemap_counter.
COUNTER_NAMES: Final = (
    "stored",
    "removed",
    "removed_unknown",
    "cleared",
    "unknown_parent",
    "unknown_place",
    "lora",
    "extra_keys",
    "images_over_limit",
    "other_medium",
    "other_group",
    "other_namespace",
    "block_size",
    "bad_token",
    "refused_full",
    "alias_changed",
    "copies_uncounted",
    "unknown_event",
    "group_unknown",
    "pages",
    "predictions",
    "predictions_confirmed",
    "predictions_expired",
    "predictions_dropped",
    "bad_frame",
    "frames",
    "duplicate",
    "gap",
    "replay",
    "replay_timeout",
    "resync",
    "snapshot",
    "other_topic",
)
SOURCES: Final = ("engine", "kvd")
_TARGET: Final = Struct("<5QII")
_MATCH: Final = Struct("<4I")
_NOTHING: Final = Match()
_TIERS: Final = tuple(Tier)
assert len(COUNTER_NAMES) == lib.CACHEMAP_COUNTERS
assert len(SOURCES) == lib.CACHEMAP_SOURCES
assert ffi.sizeof("cachemap_target") == _TARGET.size
assert ffi.sizeof("cachemap_match") == _MATCH.size


class MapUnusableError(Exception):
    """Memory that holds no cache map this version can read."""


class MapReader:
    """Reads a map that another process, or this one, writes. Any thread may use it."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Raises MapUnusableError."""
        status = ffi.new("int *")
        self._memory = memory
        self._bytes = ffi.from_buffer(memory)
        view = lib.cachemap_view_open(self._bytes, len(memory), status)
        if view == ffi.NULL:
            raise MapUnusableError(f"not a cache map of this version (status {status[0]})")
        self._view = ffi.gc(view, lib.cachemap_view_close)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> MapReader:
        """Maps the whole file for reading; the descriptor may be closed afterwards."""
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
        return cls(memory)

    def match(self, keys: bytes, targets: Sequence[Target]) -> list[Match]:
        """See CacheMap.match. Raises ValueError for more targets than one call takes."""
        found = ffi.new("cachemap_match[]", len(targets))
        self._match(keys, b"".join(map(pack_target, targets)), len(targets), found)
        return [_as_match(grains) for grains in _MATCH.iter_unpack(ffi.buffer(found))]

    def _match(self, keys: bytes, packed: bytes, count: int, found: Any) -> None:
        targets = ffi.cast("cachemap_target *", ffi.from_buffer(packed))
        status = lib.cachemap_match_all(self._view, keys, len(keys) // KEY_BYTES, targets, count, found)
        if status == lib.CACHEMAP_FULL:
            raise ValueError(f"{count} targets; one match takes {lib.CACHEMAP_TARGETS_MAX} at most")
        if status != lib.CACHEMAP_OK:
            raise MemoryError("no memory to match a hybrid model's prompt")

    def blocks_by_tier(self, holder: int) -> dict[Tier, int]:
        """How many different blocks the holder has in each tier."""
        facts = self._holder(holder)
        return {tier: int(facts.blocks[tier]) for tier in _TIERS if facts.blocks[tier]} if facts else {}

    def block_size_tokens(self, holder: int) -> int | None:
        """The block size that the holder's events name; None before the first."""
        facts = self._holder(holder)
        return int(facts.block_size_tokens) or None if facts else None

    def frames_seen(self, holder: int) -> int:
        """Event frames that came for the holder."""
        facts = self._holder(holder)
        return int(facts.frames) if facts else 0

    @property
    def view_handle(self) -> Any:
        """The C view, for measuring."""
        return self._view

    def facts(self) -> Any:
        """The whole map's numbers, a `cachemap_facts`."""
        facts = ffi.new("cachemap_facts *")
        lib.cachemap_read_facts(self._view, facts)
        return facts

    def counters(self, source: str) -> Counter[str]:
        """What became of everything that a source said, without zeros."""
        first = SOURCES.index(source) * len(COUNTER_NAMES)
        facts = self.facts()  # kept: an array within it does not keep it alive
        values = list(facts.counters)[first : first + len(COUNTER_NAMES)]
        return Counter({name: int(value) for name, value in zip(COUNTER_NAMES, values, strict=True) if value})

    @property
    def entry_count(self) -> int:
        """Entries over all holders and tiers."""
        return int(self.facts().entries)

    @property
    def entry_limit(self) -> int:
        """New blocks are refused from here on."""
        return int(self.facts().entries_max)

    def _holder(self, holder: int) -> Any:
        facts = ffi.new("cachemap_holder_facts *")
        return facts if lib.cachemap_read_holder(self._view, holder, facts) else None


class NativeCacheMap(MapReader):
    """The writer; see CacheMap for the contract. Belongs to one thread."""

    def __init__(self, entry_limit: int = ENTRY_LIMIT_DEFAULT, seed: tuple[int, int] | None = None) -> None:
        """Raises ValueError for a limit no map can have, OSError when there is no memory."""
        size_bytes = lib.cachemap_bytes(entry_limit)
        if not size_bytes:
            raise ValueError(f"a cache map cannot have {entry_limit} entries")
        self.descriptor = os.memfd_create("infera-cachemap", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size_bytes)
        memory = mmap.mmap(self.descriptor, size_bytes)
        seeds = ffi.new("uint64_t[2]", seed or (secrets.randbits(64), secrets.randbits(64)))
        made = lib.cachemap_create(ffi.from_buffer(memory), size_bytes, entry_limit, seeds)
        if made == ffi.NULL:
            raise MemoryError("no memory for the cache map")
        self.handle: Any = ffi.gc(made, lib.cachemap_close)
        super().__init__(memory)

    def close(self) -> None:
        """Tell readers that nobody keeps this map any more; the memory goes with the last of them."""
        if self.descriptor >= 0:
            lib.cachemap_abandon(self.handle)
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)

    def add_holder(self, name: str, *, counts_copies: bool = True) -> int:
        """A handle for a new, empty holder. Raises ValueError at the limit of holders."""
        holder = int(lib.cachemap_holder_add(self.handle, counts_copies))
        if not holder:
            raise ValueError(f"no room for {name}: {lib.CACHEMAP_HOLDERS_MAX} ranks and namespaces are followed")
        return holder

    def drop_holder(self, holder: int) -> None:
        """Forget the holder and everything it held; the handle is void."""
        self._must(lib.cachemap_holder_drop(self.handle, holder))

    def clear(self, holder: int) -> None:
        """Forget everything the holder held."""
        self._must(lib.cachemap_holder_clear(self.handle, holder))

    def store(self, holder: int, tier: Tier, keys: Iterable[bytes] | bytes) -> int:
        """Enter blocks; returns how many were refused at the limit. Raises KeyError for a void handle."""
        packed = self._packed(holder, keys)
        return int(lib.cachemap_store(self.handle, holder, tier, packed, len(packed) // KEY_BYTES))

    def remove(self, holder: int, tier: Tier, keys: Iterable[bytes] | bytes) -> int:
        """Take blocks out once; returns how many were unknown. Raises KeyError for a void handle."""
        packed = self._packed(holder, keys)
        return int(lib.cachemap_remove(self.handle, holder, tier, packed, len(packed) // KEY_BYTES))

    def predict(self, holder: int, keys: bytes, *, now_ms: int, life_ms: int = PREDICTION_LIFE_MS) -> int:
        """Enter what a request just sent there will store; it counts as HBM until its event comes or its life is
        over. Returns how many blocks were new."""
        return int(lib.cachemap_predict(self.handle, holder, keys, len(keys) // KEY_BYTES, now_ms, life_ms))

    def tick(self, now_ms: int) -> bool:
        """End old predictions and sweep a part of what was forgotten; True while there is more to sweep."""
        return bool(lib.cachemap_tick(self.handle, now_ms))

    def count(self, source: str, counter: str, more: int = 1) -> None:
        """Count something that happened outside the map."""
        lib.cachemap_count(self.handle, SOURCES.index(source), COUNTER_NAMES.index(counter), more)

    def touched_bytes(self) -> int:
        """Memory that was ever written to; the rest takes none."""
        return os.fstat(self.descriptor).st_blocks * 512

    def audit(self) -> str | None:
        """What is wrong with the books; slow."""
        wrong = lib.cachemap_audit(self.handle)
        return None if wrong == ffi.NULL else ffi.string(wrong).decode()

    def _packed(self, holder: int, keys: Iterable[bytes] | bytes) -> bytes:
        if self._holder(holder) is None:
            raise KeyError(holder)
        return keys if isinstance(keys, bytes) else b"".join(keys)

    @staticmethod
    def _must(status: int) -> None:
        if status != lib.CACHEMAP_OK:
            raise KeyError("void holder")


class EngineDecoder:
    """Enters one engine rank's frames. ``adapters``: LoRA name in events -> digest of its weights."""

    def __init__(
        self,
        cache_map: NativeCacheMap,
        holder: int,
        *,
        engine: str = "vllm",
        adapters: Mapping[str, bytes] | None = None,
    ) -> None:
        dialect = lib.CACHEMAP_SGLANG if engine == "sglang" else lib.CACHEMAP_VLLM
        made = lib.cachemap_engine_open(cache_map.handle, holder, dialect)
        if made == ffi.NULL:
            raise MemoryError("no memory for a worker's events")
        self._map = cache_map
        self._holder = holder
        self._handle: Any = made
        try:
            self.set_adapters(adapters or {})
        except ValueError:
            self.close()
            raise

    def set_adapters(self, adapters: Mapping[str, bytes]) -> None:
        """What LoRA names stand for from now on; what is entered stays. Names that are not here are not followed.

        Raises:
            ValueError: when a name or digest is empty or too long, or there are too many; nothing is changed then.
        """
        if self._handle == ffi.NULL:
            return
        entries = [(name.encode(), digest) for name, digest in adapters.items()]
        if len(entries) > lib.CACHEMAP_ADAPTERS_MAX or not all(
            0 < len(name) <= ADAPTER_NAME_BYTES_MAX and 0 < len(digest) <= ADAPTER_DIGEST_BYTES_MAX
            for name, digest in entries
        ):
            raise ValueError(
                f"LoRA adapters: {lib.CACHEMAP_ADAPTERS_MAX} at most, with names of 1 to {ADAPTER_NAME_BYTES_MAX} "
                f"bytes and digests of 1 to {ADAPTER_DIGEST_BYTES_MAX}"
            )
        lib.cachemap_engine_forget_adapters(self._handle)
        for name, digest in entries:
            if lib.cachemap_engine_adapter(self._handle, name, len(name), digest, len(digest)) != lib.CACHEMAP_OK:
                raise MemoryError("no memory for a worker's adapters")

    def close(self) -> None:
        """Free it; the rank's holder stays."""
        if self._handle != ffi.NULL:
            lib.cachemap_engine_close(self._handle)
            self._handle = ffi.NULL

    def apply(self, payload: bytes) -> bool:
        """Apply one frame; False when it is not what its sender's format says. Raises RuntimeError once closed."""
        if self._handle == ffi.NULL:
            raise RuntimeError("this rank is not followed any more")
        return bool(lib.cachemap_engine_apply(self._handle, payload, len(payload)) == lib.CACHEMAP_OK)

    def reset(self) -> None:
        """Forget everything."""
        if self._handle != ffi.NULL:
            lib.cachemap_engine_reset(self._handle)

    @property
    def alias_count(self) -> int:
        """Engine hashes known at the moment."""
        return int(lib.cachemap_engine_aliases(self._handle))

    @property
    def block_size_tokens(self) -> int | None:
        """The block size that events name."""
        return self._map.block_size_tokens(self._holder)


class KvdDecoder:
    """Enters one kvd's frames into the holders of its namespaces."""

    def __init__(self, cache_map: NativeCacheMap) -> None:
        made = lib.cachemap_kvd_open(cache_map.handle)
        if made == ffi.NULL:
            raise MemoryError("no memory for a kvd's events")
        self._map = cache_map
        self._handle: Any = ffi.gc(made, lib.cachemap_kvd_close)

    def set_namespace(self, namespace: str, holder: int) -> None:
        """Enter a namespace's records in a holder. Raises ValueError at the limit of namespaces."""
        name = namespace.encode()
        if lib.cachemap_kvd_namespace(self._handle, name, len(name), holder) != lib.CACHEMAP_OK:
            raise ValueError(f"more than {lib.CACHEMAP_NAMESPACES_MAX} namespaces in one kvd")

    def drop_namespace(self, namespace: str) -> None:
        """Leave a namespace's records out from now on."""
        name = namespace.encode()
        lib.cachemap_kvd_namespace(self._handle, name, len(name), 0)

    def apply(self, payload: bytes) -> bool:
        """Apply one frame; False when it is not what kvd sends."""
        return bool(lib.cachemap_kvd_apply(self._handle, payload, len(payload)) == lib.CACHEMAP_OK)

    def reset(self) -> None:
        """Forget everything."""
        lib.cachemap_kvd_reset(self._handle)


def pack_target(target: Target) -> bytes:
    """A target as C reads it. Raises ValueError for more shared holders than one target can have."""
    shared = target.shared_holders
    if len(shared) > lib.CACHEMAP_SHARED_MAX:
        raise ValueError(f"{len(shared)} shared holders; a target has {lib.CACHEMAP_SHARED_MAX} at most")
    return _TARGET.pack(target.own_holder or 0, *shared, *_ZEROS[len(shared) :], target.stride_grains, 0)


_ZEROS: Final = (0, 0, 0, 0)


def _as_match(grains: tuple[int, ...]) -> Match:
    if not any(grains):
        return _NOTHING
    return Match({tier: grains[tier] * GRAIN_TOKENS for tier in _TIERS if grains[tier]})
