from __future__ import annotations

from typing import Any

import pytest

from infera.prompt.anthropic import chat_body_of
from infera.prompt.outcome import UnrenderableError

USED = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}


def body_of(messages: list[Any] | None = None, *, merges_system: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages if messages is not None else [{"role": "user", "content": "q"}], **fields}
    return chat_body_of(body, merges_system=merges_system, disabled_effort="low")


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": entry, "cache_control": {"type": "ephemeral"}} for entry in texts]


def test_system_blocks_are_joined_without_the_line_that_changes() -> None:
    made = body_of(system=text("x-anthropic-billing-header: cch=1", "a", "b"))["messages"]
    assert made == [{"role": "system", "content": "ab"}, {"role": "user", "content": "q"}]
    assert body_of(system="x-anthropic-billing-header: c\nrest")["messages"][0]["content"].endswith("rest")


@pytest.mark.parametrize("merges", [False, True])
def test_inline_system_messages_move_where_the_template_wants_them_first(merges: bool) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "system", "content": "s"}, {"role": "user", "content": "r"}]
    made = body_of(messages, merges_system=merges, system="t")["messages"]
    expected = [("system", "ts"), ("user", "q"), ("user", "r")]
    if not merges:
        expected = [("system", "t"), ("user", "q"), ("system", "s"), ("user", "r")]
    assert [(message["role"], message["content"]) for message in made] == expected


def test_blocks_of_an_answer_become_one_message() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking"}, *text("a"), USED]
    assert body_of([{"role": "assistant", "content": blocks}])["messages"] == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "a",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        }
    ]


def test_tool_results_come_before_the_text_beside_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": text("x", "y")}
    assert body_of([{"role": "user", "content": [*text("a", "b"), result]}])["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": "x\ny"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert [message["role"] for message in body_of([{"role": "user", "content": [result]}])["messages"]] == ["tool"]


def test_references_to_tools_are_a_result_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    assert body_of([{"role": "user", "content": [result]}])["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "tool_reference", "name": "f"}]},
    ]


def test_tools_and_choices_are_translated() -> None:
    made = body_of(tools=[{"name": "f", "input_schema": {"properties": {}}}], tool_choice={"type": "any"})
    assert made["tools"][0]["function"]["parameters"] == {"properties": {}, "type": "object"}
    assert made["tool_choice"] == "required"
    assert "tools" not in body_of()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "low"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, None),
    ],
)
def test_thinking_becomes_an_effort(fields: dict[str, Any], effort: str | None) -> None:
    assert body_of(**fields).get("reasoning_effort") == effort


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ("x", {}, "malformed"),
        ([{"role": "tool", "content": "x"}], {}, "malformed"),
        ([{"role": "user", "content": 3}], {}, "malformed"),
        ([{"role": "user", "content": [{"type": "else"}]}], {}, "malformed"),
        ([{"role": "user", "content": [{"type": "image", "source": {"data": ""}}]}], {}, "not_text"),
        (
            [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}],
            {},
            "not_text",
        ),
        ([{"role": "assistant", "content": [{**USED, "id": None}]}], {}, "tool_use_id"),
        ([{"role": "assistant", "content": [{**USED, "input": "x"}]}], {}, "malformed"),
        ([{"role": "system", "content": [{"type": "tool_removal"}]}], {}, "tool_change"),
        ([], {"tools": [{"name": "f"}]}, "malformed"),
        ([], {"tool_choice": {"type": "some"}}, "malformed"),
        ([], {"output_config": {"effort": "none"}}, "malformed"),
        ([], {"thinking": "yes"}, "malformed"),
    ],
)
def test_what_cannot_be_translated_has_a_reason(messages: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnrenderableError) as caught:
        body_of(messages, **fields)
    assert caught.value.reason == reason
