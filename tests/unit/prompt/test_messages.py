from __future__ import annotations

import json
from typing import Any

import pytest

from infera.prompt.messages import developer_as_system, normalise_messages
from infera.prompt.outcome import UnrenderableError
from infera.prompt.tools import tools_for_template


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def test_text_parts_are_joined_for_string_templates_and_kept_for_the_others() -> None:
    message = {"role": "user", "content": text("a", "b")}
    assert normalise_messages([message], "string") == [{"role": "user", "content": "a\nb"}]
    assert normalise_messages([message], "openai") == [{"role": "user", "content": text("a", "b")}]
    assert normalise_messages([{"role": "user", "content": "a"}], "openai")[0]["content"] == text("a")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "anything"])
def test_what_is_not_text_is_unrenderable(kind: str) -> None:
    with pytest.raises(UnrenderableError) as caught:
        normalise_messages([{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}], "string")
    assert caught.value.reason == "not_text"


@pytest.mark.parametrize("messages", [None, "x", [], ["x"], [{}], [{"role": 1}], [{"role": "user", "content": 5}]])
def test_malformed_messages_are_left_to_the_engine(messages: Any) -> None:
    with pytest.raises(UnrenderableError) as caught:
        normalise_messages(messages, "string")
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("given", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ("not json", {}), ("[1]", {}), ({"b": 2}, {"b": 2})],
)
def test_tool_call_arguments_become_objects(given: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    made = normalise_messages([message], "string")[0]
    assert made["tool_calls"][0]["function"]["arguments"] == expected
    assert made["content"] == ""
    assert call["function"]["arguments"] == given  # type: ignore[index]


def test_empty_tool_calls_vanish_and_reasoning_has_both_names() -> None:
    made = normalise_messages(
        [{"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "r"}], "string"
    )
    assert made == [{"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}]


def test_tool_results_are_plain_text_even_for_templates_with_parts() -> None:
    made = normalise_messages([{"role": "tool", "tool_call_id": "1", "content": text("a", "b")}], "openai")
    assert made == [{"role": "tool", "tool_call_id": "1", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("orders", "expected"), [(True, '{"arguments": {"a": 1}, "name": "f", "x": 2}'), (False, None)]
)
def test_tool_calls_of_a_chat_take_the_order_of_the_engines_types(orders: bool, expected: str | None) -> None:
    """A template that writes a whole call out as JSON shows in which order its fields came."""
    function = {"name": "f", "x": 2, "arguments": '{"a": 1}'}
    call = {"type": "function", "index": 0, "id": "1", "function": function}
    message = {"role": "assistant", "tool_calls": [call]}
    made = normalise_messages([message], "string", orders_calls=orders)[0]["tool_calls"][0]
    assert list(made) == (["id", "function", "type", "index"] if orders else list(call))
    assert json.dumps(made["function"]) == (expected or '{"name": "f", "x": 2, "arguments": {"a": 1}}')


@pytest.mark.parametrize(("form", "expected"), [("string", "f"), ("openai", [{"type": "tool_reference", "name": "f"}])])
def test_references_to_tools_stay_what_they_are(form: Any, expected: Any) -> None:
    content = [{"type": "tool_reference", "name": "f"}]
    assert (
        normalise_messages([{"role": "tool", "tool_call_id": "1", "content": content}], form)[0]["content"] == expected
    )


def test_attribution_line_of_a_system_message_is_dropped() -> None:
    made = normalise_messages([{"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief"}], "string")
    assert made[0]["content"] == "Be brief"


def test_developer_becomes_the_one_system_message() -> None:
    messages = normalise_messages(
        [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}],
        "string",
    )
    assert developer_as_system(messages) == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]


def test_tools_take_the_engines_fields_in_the_engines_order() -> None:
    tool = {
        "function": {"strict": True, "parameters": {"z": 1, "a": 2}, "name": "f", "x": 1},
        "type": "function",
        "y": 2,
    }
    made = tools_for_template([tool])
    assert made == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}, "strict": True},
        }
    ]
    assert list(made[0]) == ["type", "function"]
    assert list(made[0]["function"]) == ["name", "description", "parameters", "strict"]
    assert tools_for_template(None) is None
