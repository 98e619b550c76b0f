"""Where a request can go: one data-parallel rank of one life of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from infera.cachemap.interface import Match, Tier
from infera.discovery.record import WorkerRecord

Key = tuple[str, int]
"""Incarnation and rank. A restarted worker has another incarnation, so nothing learned of its past applies."""

Kind = tuple[str, str, str]
"""Model, engine, hardware: workers alike in these are expected to be alike in speed."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a worker. What every pick asks for is worked out once."""

    record: WorkerRecord
    dp_rank: int = 0
    key: Key = field(init=False)
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        record = self.record
        object.__setattr__(self, "key", (record.incarnation, self.dp_rank))
        object.__setattr__(self, "kind", (record.model, record.engine, record.hardware or ""))

    @property
    def worker_id(self) -> str:
        """The name people see."""
        return self.record.worker_id


@dataclass(frozen=True, slots=True)
class Option:
    """A place that may serve the request, with what it holds of each of the request's prompts.

    ``is_guess``: the matches come from the text of earlier prompts, not from the worker's events.
    """

    place: Place
    matches: tuple[Match, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    is_suspect: bool = False
    is_guess: bool = False


Held = tuple[int, int, int, int]
NOTHING: Held = (0, 0, 0, 0)
_TIERS = tuple(Tier)


def usable_tokens(option: Option) -> Held:
    """Cached tokens by tier (hbm, ram, disk, peer) over all prompts.

    An engine always computes a prompt's last token itself, so of a prompt that is cached to its end the last block
    does not count.
    """
    block = option.place.record.block_size_tokens or 1
    if len(option.matches) == 1:
        return _usable(option.matches[0], option.prompt_lengths[0], block)
    parts = [_usable(*one, block) for one in zip(option.matches, option.prompt_lengths, strict=False)]
    hbm, ram, disk, peer = (sum(column) for column in zip(NOTHING, *parts, strict=True))
    return hbm, ram, disk, peer


def _usable(match: Match, length: int, block: int) -> Held:
    by_tier = match.tokens_by_tier
    if not by_tier:
        return NOTHING
    left = max(0, length - 1) // block * block
    found = [0, 0, 0, 0]
    for tier in _TIERS:
        held = by_tier.get(tier)
        if held:
            found[tier] = taken = held if held < left else left
            left -= taken
    return found[0], found[1], found[2], found[3]
