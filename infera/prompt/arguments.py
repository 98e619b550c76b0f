"""The arguments a template is rendered with: the engine's defaults, the request's, and what fields stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from infera.prompt.outcome import UnrenderableError

# Names that would change how the engine calls its renderer, not what the template sees.
RESERVED_ARGUMENTS: Final = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "return_assistant_tokens_mask"}
)
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNSET: Final = (None, "auto")


def template_arguments(
    defaults: Mapping[str, Any],
    own: Any,
    *,
    generates: bool,
    continues: bool,
    effort: Any = None,
    documents: Any = None,
) -> dict[str, Any]:
    """Arguments of one request. ``own`` is its chat_template_kwargs, ``effort`` its reasoning effort.

    A value of None or "auto" counts as not given. An effort switches thinking on or off where the request
    does not say so itself. Raises UnrenderableError when the request is malformed or reaches too far.
    """
    if own is None:
        own = {}
    if not isinstance(own, dict):
        raise UnrenderableError("malformed", "chat_template_kwargs must be an object")
    reserved = sorted(RESERVED_ARGUMENTS & own.keys())
    if reserved:
        raise UnrenderableError("reserved_argument", f"chat_template_kwargs holds {', '.join(reserved)}")
    if effort is not None and effort not in EFFORTS:
        raise UnrenderableError("malformed", f"reasoning effort must be one of {', '.join(EFFORTS)}")
    if continues and generates:
        raise UnrenderableError("malformed", "continue_final_message and add_generation_prompt exclude each other")
    fields: dict[str, Any] = {
        "add_generation_prompt": generates,
        "continue_final_message": continues,
        "documents": documents,
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        fields["enable_thinking"] = effort != "none"
    return {**defaults, **_given(own), **_given(fields)}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in _UNSET}
