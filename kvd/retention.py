"""How much a record is worth keeping, and what a put says of its records."""

from __future__ import annotations

from dataclasses import dataclass

from infera_core import lib

RETENTIONS: dict[str, int] = {
    "none": lib.STORE_RETAIN_NONE,
    "ephemeral": lib.STORE_RETAIN_EPHEMERAL,
    "short": lib.STORE_RETAIN_SHORT,
    "long": lib.STORE_RETAIN_LONG,
    "pinned": lib.STORE_RETAIN_PINNED,
}


def retention_number(name: str) -> int:
    """The number of a retention class.

    Raises:
        ValueError: when there is no such class.
    """
    if name not in RETENTIONS:
        raise ValueError(f"no retention class {name!r}; use {', '.join(RETENTIONS)}")
    return RETENTIONS[name]


@dataclass(frozen=True)
class TenantUsage:
    """What one tenant has. `is_overflow`: all those that found the table full."""

    tag: int
    size_bytes: int
    records: int
    is_overflow: bool
