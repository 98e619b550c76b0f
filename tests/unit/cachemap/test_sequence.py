"""Event streams with loss, duplicates and reordering, against the engine's own truth."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infera.cachemap.engine_index import EngineIndex
from infera.cachemap.python_map import PythonCacheMap
from infera.cachemap.sequence import SequenceTracker, Step
from infera.cachemap.vllm_events import decode_vllm_batch
from tests.support.engine_events import frame, removed, stored


def test_join_takes_everything_from_the_beginning() -> None:
    tracker = SequenceTracker()
    assert tracker.join().replay_from == 0
    assert tracker.live(2, b"c") == Step()
    assert tracker.replayed(0, b"a") == Step([b"a"])
    assert tracker.replayed(1, b"b") == Step([b"b"])
    assert tracker.replay_ended() == Step([b"c"])
    assert tracker.live(3, b"d") == Step([b"d"])


def test_joining_late_forgets_nothing_because_nothing_is_known() -> None:
    tracker = SequenceTracker()
    tracker.join()
    assert tracker.replayed(500, b"a") == Step([b"a"])
    assert tracker.replay_ended() == Step()
    assert tracker.resyncs == 0
    assert tracker.next_sequence == 501


def test_a_gap_is_healed_by_a_replay() -> None:
    tracker = _joined(0)
    step = tracker.live(3, b"d")
    assert step == Step(replay_from=0)
    for sequence, payload in enumerate([b"a", b"b", b"c", b"d"]):
        assert tracker.replayed(sequence, payload).frames == [payload]
    assert tracker.replay_ended() == Step()
    assert (tracker.gaps, tracker.resyncs, tracker.duplicates) == (1, 0, 1)


def test_a_gap_that_cannot_be_healed_forgets_what_was_known() -> None:
    tracker = _joined(0)
    tracker.live(0, b"a")
    tracker.live(5, b"f")
    assert tracker.replay_ended() == Step([b"f"], resync=True)
    tracker.live(9, b"j")
    assert tracker.replayed(8, b"i") == Step([b"i"], resync=True)
    assert tracker.replay_ended() == Step([b"j"])
    assert tracker.resyncs == 2


def test_duplicates_and_old_frames_are_dropped() -> None:
    tracker = _joined(0)
    tracker.live(0, b"a")
    assert tracker.live(0, b"a") == Step()
    assert tracker.replayed(0, b"a") == Step()
    assert tracker.duplicates == 2


def test_waiting_frames_are_bounded_and_what_is_dropped_is_noticed() -> None:
    tracker = SequenceTracker(waiting_frames_max=3)
    tracker.join()
    tracker.replayed(0, b"0")
    for sequence in range(1, 10):
        tracker.live(sequence, b"%d" % sequence)
    assert tracker.replay_ended() == Step([b"7", b"8", b"9"], resync=True)


def _joined(next_sequence: int) -> SequenceTracker:
    tracker = SequenceTracker()
    tracker.join()
    tracker.replay_ended()
    tracker.next_sequence = next_sequence
    return tracker


class Engine:
    """An engine that stores and evicts blocks at random and numbers what it says."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: dict[int, int] = {}
        self.frames: list[bytes] = []

    def step(self) -> None:
        if self.held and self.rng.random() < 0.4:
            name = self.rng.choice(list(self.held))
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
            self.frames.append(frame(removed([name])))
        else:
            name = self.rng.randrange(1, 8)
            self.held[name] = self.held.get(name, 0) + 1
            self.frames.append(frame(stored([name], None, [name] * 16)))


class Follower:
    """What the subscriber does with a tracker, without sockets."""

    def __init__(self) -> None:
        self.map = PythonCacheMap()
        self.index = EngineIndex(self.map, self.map.add_holder("w"), Counter())
        self.tracker = SequenceTracker()

    def take(self, step: Step) -> int | None:
        if step.resync:
            self.index.reset()
        for payload in step.frames:
            self.index.apply(decode_vllm_batch(payload))
        return step.replay_from

    def names(self) -> set[int]:
        return {name for _, name in self.index._aliases if isinstance(name, int)}


@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(["lose", "twice", "swap", "none", "none"]), min_size=5, max_size=60),
    window=st.integers(0, 70),
)
def test_never_a_ghost_and_never_a_missed_block_when_the_stream_is_whole(
    seed: int, faults: list[str], window: int
) -> None:
    engine, follower = Engine(random.Random(seed)), Follower()

    def heal(start: int | None) -> None:
        while start is not None:
            first = max(start, len(engine.frames) - window)
            for sequence in range(first, len(engine.frames)):
                follower.take(follower.tracker.replayed(sequence, engine.frames[sequence]))
            start = follower.take(follower.tracker.replay_ended())

    heal(follower.take(follower.tracker.join()))
    late: list[int] = []
    for fault in faults:
        engine.step()
        sequence = len(engine.frames) - 1
        arriving = {"lose": [], "twice": [sequence, sequence], "swap": []}.get(fault, [sequence])
        if fault == "swap":
            late.append(sequence)
        elif late:
            arriving = [*arriving, *late]
            late = []
        for number in arriving:
            heal(follower.take(follower.tracker.live(number, engine.frames[number])))
    engine.step()
    heal(follower.take(follower.tracker.live(len(engine.frames) - 1, engine.frames[-1])))
    truth = set(engine.held)
    assert follower.names() <= truth, "a ghost"
    if follower.tracker.resyncs == 0:
        assert follower.names() == truth
        assert follower.map.entry_count == len(truth)
