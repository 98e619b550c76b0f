"""Whether loading a hit is faster than computing it. A cache that makes a request slower is worse than none.

Both speeds are measured where they happen: loads by the workers, computing by the scheduler from steps that were
mostly prefill. As long as one of them is unknown, hits are loaded. A speed measured once in a bad moment must not keep
the cache out of use for ever, so every so often a hit is loaded against the prediction.
"""

from __future__ import annotations

import os
from typing import Final

ALWAYS_VARIABLE: Final = "INFERA_KVD_LOADS"
"""`always` loads every hit; `auto` (the default) those that are worth it."""
EXPLORE_EVERY: Final = 16
SMOOTHING: Final = 0.2
LOAD_OVERHEAD_S: Final = 0.002
"""An asynchronous load costs its request about a step: it is looked at again when the load is done."""
PREFILL_SAMPLE_TOKENS_MIN: Final = 256
LOAD_SAMPLE_BYTES_MIN: Final = 1 << 16


class LoadWorth:
    """The two speeds, and the answer."""

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._tokens_per_s: float | None = None
        self._bytes_per_s: float | None = None
        self._refused = 0

    @classmethod
    def from_environment(cls) -> LoadWorth:
        """Raises ValueError for a value that is neither `always` nor `auto`."""
        word = os.environ.get(ALWAYS_VARIABLE, "auto")
        if word not in ("always", "auto"):
            raise ValueError(f"{ALWAYS_VARIABLE} is {word!r}; it should be always or auto")
        return cls(always=word == "always")

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= PREFILL_SAMPLE_TOKENS_MIN and seconds > 0:
            self._tokens_per_s = _smoothed(self._tokens_per_s, tokens / seconds)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A load copied so many bytes, from its order to its end."""
        if size_bytes >= LOAD_SAMPLE_BYTES_MIN and seconds > 0:
            self._bytes_per_s = _smoothed(self._bytes_per_s, size_bytes / seconds)

    def is_worth(self, tokens: int, size_bytes: int) -> bool:
        """Whether to load a hit. Asked once for each load that would begin, since every so often it tries anyway."""
        if self._always or self._tokens_per_s is None or self._bytes_per_s is None:
            return True
        if size_bytes / self._bytes_per_s + LOAD_OVERHEAD_S < tokens / self._tokens_per_s:
            return True
        self._refused += 1
        return self._refused % EXPLORE_EVERY == 0


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)
