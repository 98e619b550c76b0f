"""Shortening a prompt as the request asks: ``truncate_prompt_tokens`` and ``truncation_side``.

Without a side the engine leaves the cut to its tokenizer, which shortens the text's own tokens from the left
and keeps the special tokens around them. With a side the finished sequence is cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from infera.prompt.outcome import UnrenderableError

WHOLE_CONTEXT: Final = -1

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """``tokens`` to keep at most (WHOLE_CONTEXT: what the model takes), cut on ``side``."""

    tokens: int
    side: Side | None = None
    output_tokens: int = 0

    def limit(self, context_tokens_max: int | None) -> int:
        """The number of tokens to keep. Raises UnrenderableError where it depends on a context not known here."""
        if self.tokens == WHOLE_CONTEXT:
            if context_tokens_max is None:
                raise UnrenderableError("truncate_prompt_tokens", "the workers do not say how long a context may be")
            # One token is left for the answer, unless the request does not say that it wants any.
            return context_tokens_max if self.output_tokens == 0 else context_tokens_max - 1
        if context_tokens_max is not None and self.tokens > context_tokens_max:
            raise UnrenderableError("malformed", "truncate_prompt_tokens is more than the model's context")
        return self.tokens


def truncation_of(body: Mapping[str, Any], output_tokens: int) -> Truncation | None:
    """What the request asks for; None where it asks for nothing. Raises UnrenderableError when malformed."""
    tokens, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise UnrenderableError("malformed", "truncation_side must be left or right")
    if tokens is None:
        return None
    if type(tokens) is not int or tokens < WHOLE_CONTEXT or tokens == 0:
        raise UnrenderableError("malformed", "truncate_prompt_tokens must be a positive number or -1")
    return Truncation(tokens, side, output_tokens)


def truncate(
    begin: array[int], tokens: array[int], end: array[int], limit: int | None, side: Side | None
) -> array[int]:
    """``tokens`` with the special tokens around them, shortened to ``limit``."""
    if limit is None:
        return begin + tokens + end
    if side == "right":
        return (begin + tokens + end)[:limit]
    if side == "left":
        return (begin + tokens + end)[-limit:]
    room = limit - len(begin) - len(end)
    if len(tokens) <= room:
        return begin + tokens + end
    if room < 0:
        raise UnrenderableError("truncate_prompt_tokens", "there is no room for the special tokens")
    return begin + tokens[len(tokens) - room :] + end


def output_tokens_of(body: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """The answer's length asked for, by the first of ``names`` that is given."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int:
                raise UnrenderableError("malformed", f"{name} must be a whole number")
            return value
    return default
