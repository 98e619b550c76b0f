"""The cache map's interface. The C map stands behind it; the tests keep a plain Python one to compare it with.

A *holder* is one cache that can hold blocks: the memory of one engine rank, or one namespace of one kvd. A
*target* is where a request can be sent (a worker's rank), with the holders it can read. kvd's blocks are
entered once and count for every worker that reads that kvd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


class Tier(IntEnum):
    """Where a block lies, fastest first."""

    HBM = 0
    RAM = 1
    DISK = 2
    PEER = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A place to send a request: its block size in grains of 16 tokens, its own holder, and those it can load from."""

    stride_grains: int
    own_holder: int | None
    shared_holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix at one target, in tokens, by the tier each block would come from."""

    tokens_by_tier: dict[Tier, int] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        """Length of the prefix in tokens."""
        return sum(self.tokens_by_tier.values())


@dataclass(frozen=True, slots=True)
class WorkerHolders:
    """Where one worker's blocks are entered: a holder for each of its ranks, and those of the kvd it reads."""

    ranks: dict[int, int] = field(default_factory=dict)
    shared: tuple[int, ...] = ()


class CacheMap(Protocol):
    """Content key -> who holds it, in which tier. One writer; every method belongs to one thread."""

    def add_holder(self, name: str, *, counts_copies: bool = True) -> int:
        """A handle for a new, empty holder.

        With ``counts_copies`` a block stored twice needs two removals (an engine may hold a block in two
        places); without, one removal takes it out (kvd holds a record once).
        """

    def drop_holder(self, holder: int) -> None:
        """Forget the holder and everything it held; the handle is void."""

    def clear(self, holder: int) -> None:
        """Forget everything the holder held."""

    def store(self, holder: int, tier: Tier, keys: Iterable[bytes]) -> int:
        """Enter blocks by their 16-byte keys. Returns how many were refused at the limit."""

    def remove(self, holder: int, tier: Tier, keys: Iterable[bytes]) -> int:
        """Take blocks out; unknown ones are ignored. Returns how many were unknown."""

    def match(self, keys: bytes, targets: Sequence[Target]) -> list[Match]:
        """Longest usable prefix of a prompt for every target. ``keys``: 16 bytes a grain, concatenated."""

    def blocks_by_tier(self, holder: int) -> dict[Tier, int]:
        """How many different blocks the holder has in each tier."""

    @property
    def entry_count(self) -> int:
        """Entries over all holders and tiers."""

    @property
    def entry_limit(self) -> int:
        """At this many entries new ones are refused; what is there stays, and removals make room."""
