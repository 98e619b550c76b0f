"""Cache events in one shape, whatever engine and version they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EVENTS_PER_BATCH_MAX: Final = 1_000_000

EngineHash = int | bytes


class EventFormatError(ValueError):
    """A frame that is not what its sender's format says; counted, and treated like a lost frame."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks an engine computed. ``tokens`` are those of all ``hashes`` in order, ``parent`` what they follow.

    ``extra_keys`` has an entry a block, or is None; ``medium`` is the engine's word for where they lie.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: tuple[int, ...]
    block_size_tokens: int
    has_lora: bool = False
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: tuple[object, ...] | None = None
    group: int = 0
    group_kind: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks an engine no longer has in ``medium``."""

    hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Everything of this sender is gone."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A kind of event this version does not know; counted."""

    kind: str


EngineEvent = BlocksStored | BlocksRemoved | AllCleared | UnknownEvent


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """What one frame held, in order."""

    time_s: float
    events: tuple[EngineEvent, ...]
    dp_rank: int | None = None
