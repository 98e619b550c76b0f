"""A request to /v1/responses as a chat: its items become messages, as the engine makes them.

Several items can be one message: reasoning, text and tool calls that follow each other belong to one
assistant. A request that continues a stored response depends on what the engine kept, so it is not rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from infera.discovery.record import RenderProfile
from infera.prompt.arguments import template_arguments
from infera.prompt.chat import ChatPrompt
from infera.prompt.outcome import UnrenderableError
from infera.prompt.tools import tools_for_template
from infera.prompt.truncation import WHOLE_CONTEXT, Truncation, output_tokens_of

ITEMS_MAX: Final = 65_536
_ELSEWHERE: Final = ("previous_response_id", "previous_input_messages", "prompt", "conversation")
_UNFINISHED: Final = ("in_progress", "incomplete")
# A tool without a schema takes one text; to the model it is a function with this one parameter.
_CUSTOM_INPUT: Final = "input"


def responses_prompt(body: Mapping[str, Any], profile: RenderProfile) -> ChatPrompt:
    """A responses request. Raises UnrenderableError when it is malformed or depends on the engine's memory."""
    for field in _ELSEWHERE:
        if body.get(field) is not None:
            raise UnrenderableError(field, f"{field} refers to what only the engine has")
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise UnrenderableError("malformed", "reasoning must be an object")
    given = body.get("input")
    continues = _continues(given)
    return ChatPrompt(
        messages=_messages(body.get("instructions"), given),
        tools=_tools(body, profile),
        arguments=template_arguments(
            profile.template_arguments,
            body.get("chat_template_kwargs"),
            generates=not continues,
            continues=continues,
            effort=(reasoning or {}).get("effort"),
        ),
        adds_special_tokens=True,
        orders_calls=False,
        truncation=None
        if body.get("truncation", "disabled") == "disabled"
        else Truncation(WHOLE_CONTEXT, None, output_tokens_of(body, "max_output_tokens")),
    )


def _continues(given: Any) -> bool:
    """Whether the last item is an answer that was cut off and is to be finished."""
    if not isinstance(given, list) or not given or not isinstance(given[-1], dict):
        return False
    last = given[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED


def _messages(instructions: Any, given: Any) -> list[dict[str, Any]]:
    if instructions is not None and not isinstance(instructions, str):
        raise UnrenderableError("malformed", "instructions must be a string")
    before = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UnrenderableError("malformed", "input must be a string or a list of items")
    if len(given) > ITEMS_MAX:
        raise UnrenderableError("too_large", f"more than {ITEMS_MAX} input items")
    messages: list[dict[str, Any]] = []
    for item in given:
        if not isinstance(item, dict):
            raise UnrenderableError("malformed", "every input item must be an object")
        _add_item(messages, item)
    return before + messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _add_call(messages, item)
    elif kind == "reasoning":
        _add_to_assistant(messages, "reasoning", _reasoning_text(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        if not isinstance(item.get("call_id"), str) or not isinstance(item.get("output"), (str, list)):
            raise UnrenderableError("malformed", f"a {kind} needs a call_id and an output")
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    elif kind in (None, "message") and isinstance(item.get("role"), str):
        if item["role"] == "assistant" and (text := _answer_text(item.get("content"))) is not None:
            _add_to_assistant(messages, "content", text)
        else:
            messages.append(dict(item))
    else:
        raise UnrenderableError("input_item", f"input of type {kind!r} is left to the engine")


def _assistant_before(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _add_to_assistant(messages: list[dict[str, Any]], field: str, text: str) -> None:
    """Fill a field that the assistant's message before does not have yet, or begin a new message."""
    before = _assistant_before(messages)
    if before is not None and before.get(field) is None:
        before[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    name, call_id = item.get("name"), item.get("call_id")
    if item["type"] == "custom_tool_call":
        arguments: Any = json.dumps({_CUSTOM_INPUT: item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments")
    if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(arguments, str)):
        raise UnrenderableError("malformed", "a tool call needs a call_id, a name and arguments in a string")
    namespace = item.get("namespace")
    if namespace and item["type"] == "function_call":
        name = f"{namespace}__{name}"
    call = {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}
    before = _assistant_before(messages)
    if before is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        before["tool_calls"] = [*(before.get("tool_calls") or []), call]


def _reasoning_text(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnrenderableError("malformed", "encrypted reasoning cannot be rendered")
    for field in ("content", "summary"):
        parts = item.get(field)
        if parts:
            if not isinstance(parts, list) or not isinstance(parts[0], dict):
                raise UnrenderableError("malformed", f"the {field} of reasoning must be a list of parts")
            text = parts[0].get("text")
            if not isinstance(text, str):
                raise UnrenderableError("malformed", f"the {field} of reasoning must hold text")
            return text
    return ""


def _answer_text(content: Any) -> str | None:
    """The text of an assistant's message: that of its first part. None where the message stays as it is."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        text = content[0].get("text") if isinstance(content[0], dict) else None
        if isinstance(text, str):
            return text
        raise UnrenderableError("not_text", "the first part of an assistant's message is not text")
    return None


def _tools(body: Mapping[str, Any], profile: RenderProfile) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnrenderableError("malformed", "tools must be a list of objects")
    if not tools or (body.get("tool_choice") == "none" and profile.excludes_tools_when_choice_none):
        return None
    flat: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            flat.append({"type": "function", "function": _function(tool)})
        elif kind in ("namespace", "custom"):
            raise UnrenderableError("tool_type", f"tools of type {kind} are left to the engine")
        # The model is shown no other type.
    return tools_for_template(flat)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}
