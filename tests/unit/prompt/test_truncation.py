from __future__ import annotations

from array import array
from typing import Any

import pytest

from infera.prompt.outcome import UnrenderableError
from infera.prompt.truncation import Truncation, output_tokens_of, truncate, truncation_of

BEGIN, TOKENS, END = array("I", [1]), array("I", [10, 11, 12, 13]), array("I", [2])


@pytest.mark.parametrize(
    ("limit", "side", "expected"),
    [
        (None, None, [1, 10, 11, 12, 13, 2]),
        (6, None, [1, 10, 11, 12, 13, 2]),
        (4, None, [1, 12, 13, 2]),
        (2, None, [1, 2]),
        (4, "left", [11, 12, 13, 2]),
        (4, "right", [1, 10, 11, 12]),
        (9, "left", [1, 10, 11, 12, 13, 2]),
    ],
)
def test_special_tokens_survive_unless_a_side_is_named(limit: int | None, side: Any, expected: list[int]) -> None:
    assert truncate(BEGIN, TOKENS, END, limit, side).tolist() == expected


def test_no_room_for_the_special_tokens_is_left_to_the_engine() -> None:
    with pytest.raises(UnrenderableError):
        truncate(BEGIN, TOKENS, END, 1, None)


def test_the_whole_context_keeps_one_token_for_an_answer() -> None:
    assert Truncation(-1, None, 0).limit(100) == 100
    assert Truncation(-1, None, 5).limit(100) == 99
    assert Truncation(7).limit(None) == 7
    with pytest.raises(UnrenderableError) as caught:
        Truncation(-1).limit(None)
    assert caught.value.reason == "truncate_prompt_tokens"
    with pytest.raises(UnrenderableError):
        Truncation(101).limit(100)


@pytest.mark.parametrize("tokens", [0, -2, 1.5, "3", True])
def test_malformed_limits(tokens: Any) -> None:
    with pytest.raises(UnrenderableError) as caught:
        truncation_of({"truncate_prompt_tokens": tokens}, 0)
    assert caught.value.reason == "malformed"


def test_a_side_alone_asks_for_nothing() -> None:
    assert truncation_of({"truncation_side": "left"}, 0) is None


def test_the_first_length_given_counts() -> None:
    assert output_tokens_of({"a": None, "b": 3}, "a", "b") == 3
    assert output_tokens_of({"a": 0, "b": 3}, "a", "b") == 0
    assert output_tokens_of({}, "a", default=16) == 16
    with pytest.raises(UnrenderableError):
        output_tokens_of({"a": "x"}, "a")
