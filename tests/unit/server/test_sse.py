from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.server.sse import FrameSplitter, FrameTooLargeError, data_of, error_of, usage_of

STREAM = b'data: {"a":1}\n\n: ping\n\nevent: x\r\ndata: two\r\n\r\ndata: [DONE]\n\n'
FRAMES = [b'data: {"a":1}\n\n', b": ping\n\n", b"event: x\r\ndata: two\r\n\r\n", b"data: [DONE]\n\n"]


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_frames_are_whole_and_no_byte_is_lost(cuts: set[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    splitter = FrameSplitter()
    frames = [frame for start, end in itertools.pairwise(places) for frame in splitter.feed(STREAM[start:end])]
    assert frames == FRAMES
    assert splitter.rest() == b""


def test_what_is_left_over_is_kept() -> None:
    splitter = FrameSplitter()
    assert splitter.feed(b"data: x\n\ndata: y") == [b"data: x\n\n"]
    assert splitter.rest() == b"data: y"


def test_a_frame_is_bounded() -> None:
    splitter = FrameSplitter(frame_bytes_max=10)
    with pytest.raises(FrameTooLargeError):
        splitter.feed(b"data: 0123456789")


def test_data_of_frames() -> None:
    assert [data_of(frame) for frame in FRAMES] == [b'{"a":1}', None, b"two", b"[DONE]"]
    assert data_of(b"data: a\ndata: b\n\n") == b"a\nb"
    assert data_of(b"data:\n\n") == b""


@pytest.mark.parametrize(
    ("data", "is_error"),
    [
        (b'{"error": {"message": "x"}}', True),
        (b'{"object":"error","message":"x"}', True),
        (b'{"error": null, "choices": []}', False),
        (b'{"choices": [{"delta": {"content": "\\"error\\": {}"}}]}', False),
        (b'{"choices": [{"index": 0}], "error": {"a": 1}}', False),
        (b"[DONE]", False),
        (b'{"error"', False),
    ],
)
def test_errors_are_recognised_by_meaning(data: bytes, is_error: bool) -> None:
    assert (error_of(data) is not None) == is_error


@pytest.mark.parametrize(
    ("data", "is_usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":1}}', True),
        (b'{"choices":[{"index":0}],"usage":{"prompt_tokens":1}}', False),
        (b'{"choices":[],"usage":null}', False),
        (b'{"choices":[{"delta":{"content":"\\"usage\\" \\"choices\\""}}]}', False),
    ],
)
def test_usage_frames_are_recognised_by_meaning(data: bytes, is_usage: bool) -> None:
    assert (usage_of(data) is not None) == is_usage
