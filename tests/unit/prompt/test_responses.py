from __future__ import annotations

from typing import Any

import pytest

from infera.discovery.record import RenderProfile
from infera.prompt.chat import ChatPrompt
from infera.prompt.outcome import UnrenderableError
from infera.prompt.responses import responses_prompt

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
MADE_CALL = {"id": "c1", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
USER = {"role": "user", "content": "q"}


def prompt(profile: RenderProfile | None = None, **body: Any) -> ChatPrompt:
    return responses_prompt(body, profile or RenderProfile())


def test_a_string_is_a_question_and_instructions_come_before_it() -> None:
    assert prompt(input="q", instructions="be brief").messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
    ]
    assert prompt(input="q").adds_special_tokens


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"text": "b"}]}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    assert prompt(input=[USER, thought, answer, CALL, CALL, output, answer]).messages == [
        USER,
        {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": [MADE_CALL, MADE_CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "a"},
    ]


def test_what_a_message_has_already_begins_a_new_one() -> None:
    answers = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert prompt(input=answers).messages == answers


def test_a_namespace_is_part_of_a_calls_name_and_custom_input_is_wrapped() -> None:
    spaced = prompt(input=[{**CALL, "namespace": "n"}]).messages[0]["tool_calls"][0]
    assert spaced["function"]["name"] == "n__f"
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "é"}
    assert prompt(input=[custom]).messages[0]["tool_calls"][0]["function"]["arguments"] == '{"input": "é"}'


def test_a_summary_stands_in_for_reasoning() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert prompt(input=[item]).messages == [{"role": "assistant", "reasoning": "s"}]


def test_an_unfinished_answer_is_continued() -> None:
    unfinished = {"type": "message", "role": "assistant", "content": "It is", "status": "incomplete"}
    arguments = prompt(input=[USER, unfinished]).arguments
    assert arguments["continue_final_message"] is True
    assert arguments["add_generation_prompt"] is False
    assert prompt(input=[unfinished, USER]).arguments["continue_final_message"] is False


def test_tools_are_functions_of_their_own_form() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    excluding = RenderProfile(excludes_tools_when_choice_none=True)
    assert prompt(input="q", tools=[tool, {"type": "web_search"}]).tools == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {}, "strict": True}}
    ]
    assert prompt(input="q", tools=[tool], tool_choice="none").tools is not None
    assert prompt(excluding, input="q", tools=[tool], tool_choice="none").tools is None
    assert prompt(input="q", tools=[]).tools is None


def test_truncation_auto_means_the_whole_context() -> None:
    automatic = prompt(input="q", truncation="auto", max_output_tokens=4).truncation
    assert automatic is not None
    assert automatic.limit(100) == 99
    assert prompt(input="q").truncation is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "q", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "q", "conversation": "conv_1"}, "conversation"),
        ({"input": "q", "prompt": {"id": "p"}}, "prompt"),
        ({}, "malformed"),
        ({"input": ["x"]}, "malformed"),
        ({"input": "q", "instructions": 3}, "malformed"),
        ({"input": "q", "reasoning": "high"}, "malformed"),
        ({"input": "q", "tools": "x"}, "malformed"),
        ({"input": "q", "tools": [{"type": "custom", "name": "c"}]}, "tool_type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input_item"),
        ({"input": [{**CALL, "arguments": {}}]}, "malformed"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "malformed"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "malformed"),
        ({"input": [{"type": "reasoning", "summary": [{"no": "text"}]}]}, "malformed"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}, "not_text"),
    ],
)
def test_what_only_the_engine_knows_has_a_reason(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnrenderableError) as caught:
        prompt(**body)
    assert caught.value.reason == reason
