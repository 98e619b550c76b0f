"""A chat completion request as prompt text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from infera.prompt.messages import developer_as_system, normalise_messages
from infera.prompt.outcome import UnrenderableError
from infera.prompt.template import RESERVED_ARGUMENTS
from infera.prompt.tokenizer import ModelTokenizer, PreparedTemplate
from infera.prompt.tools import tools_for_template

# Request fields that change the prompt in ways only the engine can carry out.
UNRENDERED_FIELDS: Final = ("chat_template", "truncate_prompt_tokens")
_UNSET: Final = (None, "auto")


def render_chat_text(tokenizer: ModelTokenizer, body: Mapping[str, Any]) -> str:
    """The text the engine tokenizes for this request. Raises UnrenderableError with the reason why not."""
    for field in UNRENDERED_FIELDS:
        if body.get(field) is not None:
            raise UnrenderableError(field, f"{field} in a request is left to the engine")
    tools = tools_for_template(body.get("tools"))
    template = tokenizer.template_for(has_tools=tools is not None)
    messages = normalise_messages(body.get("messages"), template.content_format)
    if any(message["role"] == "developer" for message in messages) and not template.template.knows_developer_role():
        messages = developer_as_system(messages)
    return template.template.render(
        messages, tools=tools, arguments=_arguments(body, template), special_tokens=tokenizer.special_tokens
    )


def _arguments(body: Mapping[str, Any], template: PreparedTemplate) -> dict[str, Any]:
    own = body.get("chat_template_kwargs")
    if own is None:
        own = {}
    if not isinstance(own, dict):
        raise UnrenderableError("malformed", "chat_template_kwargs must be an object")
    reserved = sorted(RESERVED_ARGUMENTS & own.keys())
    if reserved:
        raise UnrenderableError("malformed", f"chat_template_kwargs may not hold {', '.join(reserved)}")
    continues = body.get("continue_final_message", False)
    generates = body.get("add_generation_prompt", True)
    if not isinstance(continues, bool) or not isinstance(generates, bool) or (continues and generates):
        raise UnrenderableError(
            "malformed", "continue_final_message and add_generation_prompt must be booleans and not both true"
        )
    named: dict[str, Any] = {
        "add_generation_prompt": generates,
        "continue_final_message": continues,
        "documents": body.get("documents"),
        "reasoning_effort": body.get("reasoning_effort"),
    }
    if body.get("reasoning_effort") is not None and "enable_thinking" not in own:
        named["enable_thinking"] = body["reasoning_effort"] != "none"
    return {**own, **{key: value for key, value in named.items() if value not in _UNSET}}
