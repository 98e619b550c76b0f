"""Lines that tell a person what a long step is doing."""

from __future__ import annotations

import sys
import time

PROGRESS_INTERVAL_S = 10.0


def say(message: str) -> None:
    """Prints one line at once. Standard error, so that what a command prints as its result stays clean."""
    print(message, file=sys.stderr, flush=True)


class Progress:
    """Says how a long step goes, at most once per interval."""

    def __init__(self, what: str, interval_s: float = PROGRESS_INTERVAL_S) -> None:
        self._what = what
        self._interval_s = interval_s
        self._started_s = time.monotonic()
        self._said_s = self._started_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started_s

    def tick(self, detail: str = "") -> None:
        """Prints a line when the last one is an interval old."""
        now_s = time.monotonic()
        if now_s - self._said_s >= self._interval_s:
            self._said_s = now_s
            say(f"{self._what}: {self.elapsed_s:.0f} s{', ' + detail if detail else ''}")

    def done(self, detail: str = "done") -> None:
        """Prints the closing line."""
        say(f"{self._what}: {detail} after {self.elapsed_s:.0f} s")
