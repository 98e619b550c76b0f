"""One request of any kind to its prompts: tokens and content keys. Runs in a thread."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Literal

from infera_core.keys import IDENTITY_BYTES_MAX, chain_keys, root_key

from infera.prompt.anthropic import chat_body_of
from infera.prompt.chat import ChatPrompt, chat_prompt, chat_text, effort_of_disabled_thinking
from infera.prompt.completions import completion_prompts
from infera.prompt.outcome import (
    Adapter,
    ContextLengthError,
    RenderedPrompt,
    RenderedRequest,
    RenderOutcome,
    Unrenderable,
    UnrenderableError,
)
from infera.prompt.responses import responses_prompt
from infera.prompt.tokenizer import ModelTokenizer
from infera.prompt.truncation import Truncation, output_tokens_of, truncate, truncation_of

RequestKind = Literal["chat", "completions", "responses", "messages"]
COMPLETION_OUTPUT_TOKENS_DEFAULT = 16


def render_request(
    found: ModelTokenizer | Unrenderable,
    kind: RequestKind,
    body: Mapping[str, Any],
    context_tokens_max: int | None,
    adapter: Adapter | None = None,
) -> RenderOutcome:
    """Tokens and keys, or why they are not known. ``adapter`` is the LoRA adapter that the request asks for.

    Raises ContextLengthError when the prompt is longer than ``context_tokens_max``.
    """
    try:
        root = root_key(salt=_salt(body), lora=adapter.digest if adapter is not None else b"")
        prompts = _token_prompts(found, kind, body, context_tokens_max)
    except UnrenderableError as error:
        return Unrenderable(error.reason, error.detail)
    except RecursionError:
        return Unrenderable("malformed", "the request is nested too deeply")
    for tokens in prompts:
        if context_tokens_max is not None and len(tokens) > context_tokens_max:
            raise ContextLengthError(context_tokens_max, f"{len(tokens)} tokens")
    # Without a digest the root would be the model's own, and an adapter's blocks are never the model's.
    has_keys = adapter is None or bool(adapter.digest)
    rendered = tuple(RenderedPrompt(tokens, chain_keys(root, tokens) if has_keys else b"") for tokens in prompts)
    return RenderedRequest(rendered, not _wants_prompt_logprobs(kind, body), adapter)


def _token_prompts(
    found: ModelTokenizer | Unrenderable, kind: RequestKind, body: Mapping[str, Any], context_tokens_max: int | None
) -> list[array[int]]:
    if kind == "completions":
        return _completion_tokens(found, body, context_tokens_max)
    tokenizer = _usable(found)
    prompt = _chat_like(tokenizer, kind, body)
    text = chat_text(tokenizer, prompt)
    return [_tokens_of(tokenizer, text, prompt.adds_special_tokens, prompt.truncation, context_tokens_max)]


def _chat_like(tokenizer: ModelTokenizer, kind: RequestKind, body: Mapping[str, Any]) -> ChatPrompt:
    if kind == "responses":
        return responses_prompt(body, tokenizer.profile)
    if kind == "chat":
        return chat_prompt(body, tokenizer.profile)
    chat = chat_body_of(
        body,
        merges_system=tokenizer.merges_system(),
        disabled_effort=tokenizer.disabled_effort(effort_of_disabled_thinking),
    )
    return chat_prompt(chat, tokenizer.profile, may_have_no_tools=True)


def _completion_tokens(
    found: ModelTokenizer | Unrenderable, body: Mapping[str, Any], context_tokens_max: int | None
) -> list[array[int]]:
    prompts = completion_prompts(body)
    output_tokens = output_tokens_of(body, "max_tokens", default=COMPLETION_OUTPUT_TOKENS_DEFAULT)
    truncation = truncation_of(body, output_tokens)
    special = body.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise UnrenderableError("malformed", "add_special_tokens must be true or false")
    made: list[array[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            made.append(_tokens_of(_usable(found), prompt, special, truncation, context_tokens_max))
        else:
            # Ids are cut as they are; without a side, engines keep the end.
            limit = truncation.limit(context_tokens_max) if truncation is not None else None
            side = (truncation.side or "left") if truncation is not None else None
            made.append(truncate(array("I"), prompt, array("I"), limit, side))
    return made


def _tokens_of(
    tokenizer: ModelTokenizer, text: str, special: bool, truncation: Truncation | None, context_tokens_max: int | None
) -> array[int]:
    # Even if every token were the longest one, a text of this many characters would not fit.
    longest = None if context_tokens_max is None else context_tokens_max * tokenizer.token_characters_max
    if truncation is None:
        if longest is not None and len(text) > longest:
            assert context_tokens_max is not None
            raise ContextLengthError(context_tokens_max, f"{len(text)} characters")
        return tokenizer.encode_prompt(text, add_special_tokens=special)
    if longest is not None and len(text) > longest and truncation.side is not None:
        text = text[-longest:] if truncation.side == "left" else text[:longest]
    return tokenizer.encode_prompt(
        text, add_special_tokens=special, limit=truncation.limit(context_tokens_max), side=truncation.side
    )


def _usable(found: ModelTokenizer | Unrenderable) -> ModelTokenizer:
    if isinstance(found, Unrenderable):
        raise UnrenderableError(found.reason, found.detail)
    return found


def _salt(body: Mapping[str, Any]) -> bytes:
    salt = body.get("cache_salt")
    if salt is None:
        return b""
    if not isinstance(salt, str) or not salt:
        raise UnrenderableError("malformed", "cache_salt must be a string that is not empty")
    encoded = salt.encode()
    if len(encoded) > IDENTITY_BYTES_MAX:
        raise UnrenderableError("malformed", f"cache_salt has more than {IDENTITY_BYTES_MAX} bytes")
    return encoded


def _wants_prompt_logprobs(kind: RequestKind, body: Mapping[str, Any]) -> bool:
    """Logprobs of the prompt, asked for directly or by echoing it with logprobs."""
    if kind not in ("chat", "completions"):
        return False
    echoes = kind == "completions" and bool(body.get("echo")) and body.get("logprobs") is not None
    return echoes or body.get("prompt_logprobs") is not None
