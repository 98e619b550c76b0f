"""A chat as prompt text: what the request says, in the engine's form, through the engine's template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infera.discovery.record import RenderProfile
from infera.prompt.arguments import EFFORTS, template_arguments
from infera.prompt.messages import developer_as_system, normalise_messages
from infera.prompt.outcome import UnrenderableError
from infera.prompt.tokenizer import ModelTokenizer
from infera.prompt.tools import tools_for_template
from infera.prompt.truncation import Truncation, output_tokens_of, truncation_of


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What every chat-like request comes down to. ``messages`` and ``tools`` are as a chat request has them;
    ``template`` is the request's own, ``adds_special_tokens`` whether the tokenizer adds its own as well,
    ``orders_calls`` whether the fields of tool calls are put in the engine's order."""

    messages: Any
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    template: str | None = None
    adds_special_tokens: bool = False
    truncation: Truncation | None = None
    orders_calls: bool = True


def chat_prompt(body: Mapping[str, Any], profile: RenderProfile, *, may_have_no_tools: bool = False) -> ChatPrompt:
    """A chat completion request. ``may_have_no_tools``: an empty list of tools is not a mistake.

    Raises UnrenderableError when it is malformed or left to the engine.
    """
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise UnrenderableError("kv_transfer_params", "the request brings the tokens of its prefill with it")
    tools = tools_for_template(body.get("tools"))
    if tools == [] and not may_have_no_tools:
        raise UnrenderableError("malformed", "tools must not be empty")
    # With no tool choice given, tools mean "auto".
    if profile.excludes_tools_when_choice_none and body.get("tool_choice") == "none":
        tools = None
    return ChatPrompt(
        messages=body.get("messages"),
        tools=tools,
        arguments=template_arguments(
            profile.template_arguments,
            body.get("chat_template_kwargs"),
            generates=_flag(body, "add_generation_prompt", default=True),
            continues=_flag(body, "continue_final_message"),
            effort=body.get("reasoning_effort"),
            documents=body.get("documents"),
        ),
        template=_own_template(body, profile),
        adds_special_tokens=_flag(body, "add_special_tokens"),
        truncation=truncation_of(body, output_tokens_of(body, "max_completion_tokens", "max_tokens")),
    )


def chat_text(tokenizer: ModelTokenizer, prompt: ChatPrompt) -> str:
    """The text the engine tokenizes. Raises UnrenderableError with the reason why there is none."""
    prepared = tokenizer.template_for(has_tools=prompt.tools is not None, own=prompt.template)
    messages = normalise_messages(prompt.messages, prepared.content_format, orders_calls=prompt.orders_calls)
    developers = [message for message in messages if message["role"] == "developer"]
    if developers and not prepared.template.knows_developer_role():
        messages = developer_as_system(messages)
    elif any(message.get("tools") for message in developers):
        raise UnrenderableError("developer_tools", "a developer message brings tools, in a form left to the engine")
    return prepared.template.render(
        messages, tools=prompt.tools, arguments=prompt.arguments, special_tokens=tokenizer.special_tokens
    )


def effort_of_disabled_thinking(tokenizer: ModelTokenizer) -> str:
    """The effort that stands for "no thinking": "none", or "low" where the template refuses or ignores "none"."""
    if tokenizer.profile.disabled_thinking_effort != "auto":
        return tokenizer.profile.disabled_thinking_effort
    without = _text_with_effort(tokenizer, "none")
    thinking = ("low", "medium", "high", "xhigh", "max")
    if without is None or any(_text_with_effort(tokenizer, effort) == without for effort in thinking):
        return "low"
    return "none"


def _text_with_effort(tokenizer: ModelTokenizer, effort: str) -> str | None:
    assert effort in EFFORTS
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    try:
        return chat_text(tokenizer, chat_prompt(body, tokenizer.profile))
    except UnrenderableError:
        return None


def _own_template(body: Mapping[str, Any], profile: RenderProfile) -> str | None:
    """The request's own template, where the engine takes one; it refuses the request otherwise."""
    own = body.get("chat_template")
    if own is None:
        return None
    if not isinstance(own, str):
        raise UnrenderableError("malformed", "chat_template must be a string")
    if not profile.trusts_request_template:
        raise UnrenderableError("chat_template", "the engine takes no template from a request")
    return own or None


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise UnrenderableError("malformed", f"{name} must be true or false")
    return value
