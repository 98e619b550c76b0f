"""A completion request as one or more prompts: text, or token ids that need no tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

from infera.prompt.outcome import UnrenderableError

PROMPTS_MAX: Final = 1024
TOKEN_ID_MAX: Final = 2**32 - 1
# What only the engine can carry out; most engines refuse a suffix.
_UNRENDERED_FIELDS: Final = ("suffix", "prompt_embeds")


def completion_prompts(body: Mapping[str, Any]) -> list[str] | list[array[int]]:
    """The prompts of a request, all text or all token ids. Raises UnrenderableError on any other shape."""
    for field in _UNRENDERED_FIELDS:
        if body.get(field) is not None:
            raise UnrenderableError(field, f"{field} in a request is left to the engine")
    prompt = body.get("prompt")
    if prompt == "":
        raise UnrenderableError("malformed", "prompt must not be empty")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise UnrenderableError("malformed", "prompt must be a string, a list of strings, or token ids")
    if type(prompt[0]) is int:
        return [_token_ids(prompt)]
    if len(prompt) > PROMPTS_MAX:
        raise UnrenderableError("too_large", f"more than {PROMPTS_MAX} prompts in one request")
    if all(isinstance(entry, str) for entry in prompt):
        return list(prompt)
    return [_token_ids(entry) for entry in prompt]


def _token_ids(entry: Any) -> array[int]:
    if not isinstance(entry, list) or not entry or any(type(token) is not int for token in entry):
        raise UnrenderableError("malformed", "a prompt of token ids must be a list of whole numbers")
    try:
        return array("I", entry)
    except OverflowError as error:
        raise UnrenderableError("malformed", f"token ids go from 0 to {TOKEN_ID_MAX}") from error
