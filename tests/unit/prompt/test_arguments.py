from __future__ import annotations

from typing import Any

import pytest

from infera.prompt.arguments import RESERVED_ARGUMENTS, template_arguments
from infera.prompt.outcome import UnrenderableError


def made(own: Any = None, defaults: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return template_arguments(defaults or {}, own, **{"generates": True, "continues": False, **fields})


def test_the_request_beats_the_engine_and_fields_beat_the_request() -> None:
    found = made({"a": 2, "add_generation_prompt": False}, {"a": 1, "b": 1})
    assert found == {"a": 2, "b": 1, "add_generation_prompt": True, "continue_final_message": False}


def test_none_and_auto_count_as_not_given() -> None:
    assert made({"a": None, "b": "auto"}, {"a": 1, "b": 2})["a"] == 1
    assert made({"b": "auto"}, {"b": 2})["b"] == 2
    assert "documents" not in made()
    assert made({"documents": [1]}, documents=None)["documents"] == [1]


@pytest.mark.parametrize(
    ("own", "effort", "expected"),
    [
        ({}, "none", False),
        ({}, "high", True),
        ({"enable_thinking": True}, "none", True),
        ({"enable_thinking": None}, "none", "absent"),
        ({}, None, "absent"),
    ],
)
def test_an_effort_switches_thinking_unless_the_request_does(own: dict[str, Any], effort: Any, expected: Any) -> None:
    assert made(own, effort=effort).get("enable_thinking", "absent") == expected


@pytest.mark.parametrize("name", sorted(RESERVED_ARGUMENTS))
def test_arguments_that_change_the_renderer_are_left_to_the_engine(name: str) -> None:
    with pytest.raises(UnrenderableError) as caught:
        made({name: 1})
    assert caught.value.reason == "reserved_argument"


@pytest.mark.parametrize(
    ("own", "fields"),
    [([], {}), ("x", {}), ({}, {"effort": "some"}), ({}, {"effort": 3}), ({}, {"generates": True, "continues": True})],
)
def test_malformed_arguments(own: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UnrenderableError) as caught:
        made(own, **fields)
    assert caught.value.reason == "malformed"
