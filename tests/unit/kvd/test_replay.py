"""The replay window: bounded twice, and never with a gap inside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.replay import ReplayWindow


def numbers(window: ReplayWindow, start: int, following: int) -> list[int] | None:
    frames = window.since(start, following)
    return None if frames is None else [sequence for sequence, _ in frames]


def test_the_count_is_bounded() -> None:
    window = ReplayWindow(frames_max=3)
    for sequence in range(10):
        window.add(sequence, b"x")
    assert len(window) == 3
    assert numbers(window, 7, 10) == [7, 8, 9]
    assert numbers(window, 6, 10) is None


def test_the_bytes_are_bounded() -> None:
    window = ReplayWindow(bytes_max=100)
    for sequence in range(10):
        window.add(sequence, bytes(40))
    assert window.size_bytes == 80
    assert numbers(window, 8, 10) == [8, 9]


def test_a_frame_larger_than_the_window_is_not_kept() -> None:
    window = ReplayWindow(bytes_max=100)
    window.add(1, bytes(101))
    assert len(window) == window.size_bytes == 0
    assert numbers(window, 1, 2) is None
    assert numbers(window, 2, 2) == []


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), max_size=60), st.integers(0, 130))
def test_an_answer_is_complete_or_none(steps: list[tuple[int, int]], start: int) -> None:
    window = ReplayWindow(frames_max=8, bytes_max=200)
    sent: dict[int, bytes] = {}
    sequence = 0
    for step, size in steps:
        sequence += step
        sent[sequence] = bytes(size)
        window.add(sequence, sent[sequence])
        assert len(window) <= 8
        assert window.size_bytes <= 200
    answer = window.since(start, sequence + 1)
    if answer is not None:
        assert answer == [(number, sent[number]) for number in range(start, sequence + 1)]
