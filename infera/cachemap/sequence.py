"""Keeps a stream of numbered frames whole: drops duplicates, notices gaps, heals them or says that it cannot.

Sans-IO: frames and replay answers go in, what to do comes out. While a replay is under way live frames wait,
up to a limit; past it the oldest are dropped, which only makes another gap that is found in turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WAITING_FRAMES_MAX: Final = 10_000

Frame = tuple[int, bytes]


@dataclass(slots=True)
class Step:
    """What to do, in this order: forget everything (``resync``), apply ``frames``, ask a replay (``replay_from``).

    ``duplicates`` says how many frames were dropped as known, ``is_gap`` that the replay is asked for because
    frames are missing.
    """

    frames: list[bytes] = field(default_factory=list)
    resync: bool = False
    replay_from: int | None = None
    duplicates: int = 0
    is_gap: bool = False


class SequenceTracker:
    """One publisher's sequence, which begins at 0. Begin with ``join``, then feed what arrives."""

    def __init__(self, waiting_frames_max: int = WAITING_FRAMES_MAX) -> None:
        self.next_sequence = 0
        self.duplicates = 0
        self.gaps = 0
        self.resyncs = 0
        self._is_replaying = False
        self._is_joining = False
        self._waiting: deque[Frame] = deque(maxlen=waiting_frames_max)

    def join(self) -> Step:
        """Ask for everything from the beginning."""
        self._is_joining = True
        self._is_replaying = True
        return Step(replay_from=0)

    def live(self, sequence: int, payload: bytes) -> Step:
        """A published frame."""
        if self._is_replaying:
            self._waiting.append((sequence, payload))
            return Step()
        if sequence < self.next_sequence:
            self.duplicates += 1
            return Step(duplicates=1)
        if sequence > self.next_sequence:
            self.gaps += 1
            self._is_replaying = True
            self._waiting.append((sequence, payload))
            return Step(replay_from=self.next_sequence, is_gap=True)
        self.next_sequence = sequence + 1
        return Step(frames=[payload])

    def replayed(self, sequence: int, payload: bytes) -> Step:
        """A frame of the replay that was asked for."""
        if not self._is_replaying or sequence < self.next_sequence:
            self.duplicates += 1
            return Step(duplicates=1)
        step = Step(frames=[payload])
        if sequence > self.next_sequence:
            step.resync = self._lost()
        self._is_joining = False
        self.next_sequence = sequence + 1
        return step

    def replay_ended(self) -> Step:
        """The replay is complete, or there will be none. Waiting frames follow; what still lacks is lost."""
        step = Step()
        self._is_replaying = False
        for sequence, payload in sorted(self._waiting, key=lambda frame: frame[0]):
            if sequence < self.next_sequence:
                self.duplicates += 1
                step.duplicates += 1
                continue
            if sequence > self.next_sequence and self._lost():
                step.resync = True
                step.frames.clear()
            self._is_joining = False
            step.frames.append(payload)
            self.next_sequence = sequence + 1
        self._waiting.clear()
        self._is_joining = False
        return step

    def _lost(self) -> bool:
        """Frames are gone for good: True when what was known before must be forgotten."""
        if self._is_joining:
            # Nothing is known yet, so nothing can be wrong: what came before only stays unknown.
            return False
        self.resyncs += 1
        return True
