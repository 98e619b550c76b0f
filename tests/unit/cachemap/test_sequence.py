"""Numbered frames: duplicates, gaps, replays, and what is lost for good."""

from __future__ import annotations

from infera.cachemap.sequence import SequenceTracker, Step


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
    assert step == Step(replay_from=0, is_gap=True)
    for sequence, payload in enumerate([b"a", b"b", b"c", b"d"]):
        assert tracker.replayed(sequence, payload).frames == [payload]
    assert tracker.replay_ended() == Step(duplicates=1)
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
    assert tracker.live(0, b"a") == Step(duplicates=1)
    assert tracker.replayed(0, b"a") == Step(duplicates=1)
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
