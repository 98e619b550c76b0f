"""`infera-kvd unpin`: let a namespace be evicted again."""

from __future__ import annotations

from kvd.commands.pin import retain
from kvd.program import UNPIN


def run(arguments: list[str]) -> int:
    """Unpin; returns the exit status."""
    return retain(UNPIN, arguments, "short")
