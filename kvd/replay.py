"""The last event frames, kept for subscribers that missed a few."""

from __future__ import annotations

import collections

REPLAY_FRAMES_MAX = 10_000
REPLAY_BYTES_MAX = 32 << 20
"""Whichever bound is reached first; then the oldest frames are forgotten."""


class ReplayWindow:
    """Frames by sequence number, without gaps: a frame that does not follow the last one starts anew."""

    def __init__(self, frames_max: int = REPLAY_FRAMES_MAX, bytes_max: int = REPLAY_BYTES_MAX) -> None:
        self._frames: collections.deque[tuple[int, bytes]] = collections.deque()
        self._frames_max = frames_max
        self._bytes_max = bytes_max
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a frame that was sent."""
        if self._frames and sequence != self._frames[-1][0] + 1:
            self._frames.clear()
            self.size_bytes = 0
        self._frames.append((sequence, payload))
        self.size_bytes += len(payload)
        while len(self._frames) > self._frames_max or self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._frames.popleft()[1])

    def since(self, sequence: int, following: int) -> list[tuple[int, bytes]] | None:
        """The frames from `sequence` up to, not including, `following`, the number of the next one.

        None when they are not all here: the subscriber needs a snapshot.
        """
        if sequence == following:
            return []
        if not self._frames or not self._frames[0][0] <= sequence < following or self._frames[-1][0] != following - 1:
            return None
        skipped = sequence - self._frames[0][0]
        return [frame for position, frame in enumerate(self._frames) if position >= skipped]
