"""A request to /v1/messages as a chat completion request, translated as the engine translates it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from infera.prompt.messages import MESSAGES_MAX
from infera.prompt.outcome import UnrenderableError

BLOCK_TYPES: Final = frozenset(
    {
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    }
)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}
# A line some clients put before the system prompt; it changes with every request, so engines drop the block.
_ATTRIBUTION: Final = "x-anthropic-billing-header"


def chat_body_of(body: Mapping[str, Any], *, merges_system: bool, disabled_effort: str) -> dict[str, Any]:
    """The chat completion request an engine makes of ``body``.

    ``merges_system``: the template takes system messages only at the front; ``disabled_effort``: the reasoning
    effort that stands for thinking switched off. Raises UnrenderableError when malformed or not text.
    """
    chat: dict[str, Any] = {
        "messages": _messages(body, merges_system),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "max_tokens": body.get("max_tokens"),
        "kv_transfer_params": body.get("kv_transfer_params"),
    }
    effort = _effort(body, disabled_effort)
    if effort is not None:
        chat["reasoning_effort"] = effort
    choice = _object(body, "tool_choice")
    if choice is not None:
        if choice.get("type") not in _CHOICES:
            raise UnrenderableError("malformed", f"tool_choice must be one of {', '.join(_CHOICES)}")
        chat["tool_choice"] = _CHOICES[choice["type"]]
    tools = _tools(body)
    if tools is not None:
        chat["tools"] = tools
    return chat


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise UnrenderableError("malformed", f"{name} must be an object")
    return value


def _effort(body: Mapping[str, Any], disabled_effort: str) -> str | None:
    effort = (_object(body, "output_config") or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise UnrenderableError("malformed", f"output_config.effort must be one of {', '.join(_EFFORTS)}")
    thinking = _object(body, "thinking")
    if thinking is not None and thinking.get("type") == "disabled":
        return disabled_effort
    return effort


def _messages(body: Mapping[str, Any], merges_system: bool) -> list[dict[str, Any]]:
    given = body.get("messages")
    if not isinstance(given, list) or len(given) > MESSAGES_MAX:
        raise UnrenderableError("malformed", f"messages must be a list of at most {MESSAGES_MAX}")
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise UnrenderableError("malformed", "every message must come from user, assistant or system")
    inline = [_inline_system_text(message.get("content")) for message in given if message["role"] == "system"]
    system = [_system_text(body.get("system")), *(inline if merges_system else ())]
    messages: list[dict[str, Any]] = []
    if text := "".join(system):
        messages.append({"role": "system", "content": text})
    for message in given:
        if message["role"] != "system":
            _add_message(messages, message)
        elif not merges_system and (text := _inline_system_text(message.get("content"))):
            messages.append({"role": "system", "content": text})
    return messages


def _inline_system_text(content: Any) -> str:
    if isinstance(content, str) and content.startswith(_ATTRIBUTION):
        return ""
    return _system_text(content)


def _system_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(
        block["text"]
        for block in _blocks(content)
        if block["type"] == "text" and block.get("text") and not block["text"].startswith(_ATTRIBUTION)
    )


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise UnrenderableError("malformed", "content must be a string or a list of blocks")
    for block in content:
        if not isinstance(block, dict) or block.get("type") not in BLOCK_TYPES:
            raise UnrenderableError("malformed", f"blocks of content are of types {', '.join(sorted(BLOCK_TYPES))}")
        for field in ("text", "thinking"):
            if not isinstance(block.get(field), (str, type(None))):
                raise UnrenderableError("malformed", f"the {field} of a block must be a string")
        if block["type"] in ("tool_addition", "tool_removal"):
            raise UnrenderableError("tool_change", "tools that change within a conversation are left to the engine")
    return content


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """One message, with the tool results in it as messages of their own before it."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        kind = block["type"]
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            raise UnrenderableError("not_text", "an image needs the model's own processor")
        elif kind == "thinking" and block.get("thinking") is not None:
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            _add_result(messages, block)
        elif kind == "tool_result":
            shown = str(block.get("content")) if block.get("content") else ""
            parts.append({"type": "text", "text": f"Tool result: {shown}"})
    made = _made_message(role, parts, calls, thoughts)
    if role == "assistant" or "content" in made:
        messages.append(made)


def _made_message(
    role: str, parts: list[dict[str, Any]], calls: list[dict[str, Any]], thoughts: list[str]
) -> dict[str, Any]:
    made: dict[str, Any] = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    return made


def _call(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, (dict, type(None))):
        raise UnrenderableError("malformed", "the input of a tool_use must be an object")
    if not block.get("id"):
        raise UnrenderableError("tool_use_id", "the engine makes up an id for a tool_use that has none")
    function = {"name": block.get("name") or "", "arguments": json.dumps(given or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _add_result(messages: list[dict[str, Any]], block: dict[str, Any]) -> None:
    content = block.get("content")
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    for item in content if isinstance(content, list) else ():
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            texts.append(item.get("text", ""))
        elif kind == "image":
            raise UnrenderableError("not_text", "an image needs the model's own processor")
        elif kind == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
            references.append({"type": "tool_reference", "name": name})
    if not all(isinstance(text, str) for text in texts):
        raise UnrenderableError("malformed", "the text of a tool_result must be a string")
    call_id = block.get("tool_use_id") or ""
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UnrenderableError("malformed", "tools must be a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise UnrenderableError("malformed", "every tool needs a name and an input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
