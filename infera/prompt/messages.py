"""A chat request's messages in the form the engine hands to its template.

Engines do not give a template what the client sent: text parts are joined or wrapped, tool call arguments
become objects, reasoning gets both its names. Anything that is not text makes the prompt unrenderable.
"""

from __future__ import annotations

import json
from typing import Any, Final

from infera.prompt.content_format import ContentFormat
from infera.prompt.outcome import UnrenderableError

MESSAGES_MAX: Final = 65_536
# Part type -> the field that holds its text.
_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_EMPTY: Final = ("text", "refusal")
_ATTRIBUTION_LINE: Final = "x-anthropic-billing-header"
# Fields of the published part types: they are used or dropped, anything else reaches the template.
_KNOWN_PART_FIELDS: Final = frozenset(
    {
        "type",
        "text",
        "refusal",
        "thinking",
        "closed",
        "image_url",
        "input_audio",
        "file",
        "video_url",
        "audio_url",
        "image_pil",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "data",
        "uuid",
        "detail",
        "name",
        "prompt_cache_breakpoint",
    }
)


def normalise_messages(
    messages: Any, content_format: ContentFormat, *, orders_calls: bool = True
) -> list[dict[str, Any]]:
    """Messages for the template; ``orders_calls``: the fields of tool calls come in the order of the engine's types.

    Raises UnrenderableError on anything but well-formed text messages.
    """
    if not isinstance(messages, list) or not messages:
        raise UnrenderableError("malformed", "messages must be a list that is not empty")
    if len(messages) > MESSAGES_MAX:
        raise UnrenderableError("too_large", f"more than {MESSAGES_MAX} messages")
    return [_normalise(message, content_format, orders_calls) for message in messages]


def developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know the developer role: it becomes system, and system messages become one."""
    renamed = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [text for text in (_plain_text(message["content"]) for message in system) if text]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _normalise(message: Any, content_format: ContentFormat, orders_calls: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnrenderableError("malformed", "every message must be an object with a role")
    role = message["role"]
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_attribution(parts)
    result: dict[str, Any] = {"role": role, "content": _content(parts, content_format)}
    if role == "assistant":
        _add_assistant_fields(result, message, orders_calls)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        content = result["content"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            result["content"] = _plain_text(content)
    elif role == "developer":
        result["tools"] = message.get("tools")
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    return result


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise UnrenderableError("malformed", "content must be a string or a list of parts")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


def _content(parts: list[dict[str, Any]], content_format: ContentFormat) -> str | list[dict[str, Any]]:
    texts: list[str] = []
    wrapped: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_reference" and part.get("uuid") is None and isinstance(part.get("name"), str):
            # A tool that the template may expand; it is not text, but it needs no processor either.
            texts.append(part["name"])
            wrapped.append({"type": "tool_reference", "name": part["name"]})
            continue
        field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
        if field is None or part.get("uuid") is not None:
            raise UnrenderableError("not_text", f"content of type {kind!r} needs the model's own processor")
        text = part.get(field)
        if text is None and kind in _SKIPPED_WHEN_EMPTY:
            continue
        if not isinstance(text, str):
            raise UnrenderableError("malformed", f"the {field} of a content part must be a string")
        texts.append(text)
        extra = {key: value for key, value in part.items() if key not in _KNOWN_PART_FIELDS}
        wrapped.append({"type": "text", "text": text, **extra})
    return wrapped if content_format == "openai" else "\n".join(texts)


def _without_attribution(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Engines drop the attribution line some clients put first: it changes with every request."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(_ATTRIBUTION_LINE):
            rest = text.partition("\n")[2]
            if rest:
                kept.append({**part, "text": rest})
        else:
            kept.append(part)
    return kept


def _plain_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _add_assistant_fields(result: dict[str, Any], message: dict[str, Any], orders_calls: bool) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise UnrenderableError("malformed", "tool_calls must be a list")
    result["tool_calls"] = [_tool_call(call, orders_calls) for call in calls]


def _tool_call(call: Any, orders_calls: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise UnrenderableError("malformed", "tool_calls must be functions")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    function = {**function, "arguments": arguments if isinstance(arguments, dict) else {}}
    whole: dict[str, Any] = {**call, "function": function}
    if not orders_calls:
        return whole
    # The engine reads a chat's tool calls into types of its own, whose fields have this order; a template that
    # writes out a whole call shows it.
    return _in_order(whole, ("id", "function", "type")) | {"function": _in_order(function, ("arguments", "name"))}


def _in_order(fields: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in first if name in fields} | fields
