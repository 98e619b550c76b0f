"""What of vLLM's command line decides how a request becomes tokens: the render profile of the worker record."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from infera.discovery.record import CHAT_TEMPLATE_BYTES_MAX, RenderProfile
from infera_vllm.arguments import ServeArguments

# Each changes prompts, or the files they are made with, in a way that only the engine follows.
UNRENDERED_FLAGS = (
    "--cohere-format",
    "--enable-prompt-embeds",
    "--hf-overrides",
    "--mm-processor-kwargs",
    "--skip-tokenizer-init",
    "--tokenizer-revision",
)
_FORMATS = ("string", "openai")


def render_profile(arguments: ServeArguments) -> RenderProfile:
    """The profile of a server started with these arguments. What cannot be read is named as unrendered."""
    unrendered = [flag for flag in UNRENDERED_FLAGS if arguments.find(flag) is not None]
    template, digest = None, ""
    if given := arguments.find("--chat-template"):
        source = _template_source(given)
        if source is None:
            unrendered.append("--chat-template")  # one of vLLM's own, by name
        else:
            encoded = source.encode()
            template = source if len(encoded) <= CHAT_TEMPLATE_BYTES_MAX else None
            digest = hashlib.sha256(encoded).hexdigest()
    defaults = _json_object(arguments, "--default-chat-template-kwargs")
    if defaults is None:
        unrendered.append("--default-chat-template-kwargs")
    content_format = arguments.find("--chat-template-content-format")
    return RenderProfile(
        tokenizer_path=arguments.find("--tokenizer") or "",
        tokenizer_mode=arguments.find("--tokenizer-mode") or "auto",
        chat_template=template,
        chat_template_digest=digest,
        content_format=content_format if content_format in _FORMATS else "auto",  # type: ignore[arg-type]
        template_arguments=defaults or {},
        excludes_tools_when_choice_none=arguments.is_set("exclude-tools-when-tool-choice-none"),
        trusts_request_template=arguments.is_set("trust-request-chat-template"),
        tool_parser=arguments.find("--tool-call-parser") or "",
        reasoning_parser=arguments.find("--reasoning-parser") or "",
        disabled_thinking_effort=arguments.find("--anthropic-disabled-thinking-effort") or "auto",
        unrendered_flags=tuple(unrendered),
    )


def _template_source(given: str) -> str | None:
    """The template's text: of the file, or the argument itself when it looks like a template."""
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError, ValueError):
        return given if any(character in given for character in "{}\n") else None


def _json_object(arguments: ServeArguments, flag: str) -> dict[str, Any] | None:
    """The object given for a flag; empty where it is absent, None where it cannot be read."""
    if any(word.partition("=")[0].replace("_", "-").startswith(flag + ".") for word in arguments.argv):
        return None  # given key by key, with types only the engine's parser knows
    given = arguments.find(flag)
    if given is None:
        return {}
    try:
        value = json.loads(given)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
