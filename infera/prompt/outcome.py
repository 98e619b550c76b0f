"""What rendering a request can end in: exact tokens, a stated reason why not, or a client's mistake."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """One prompt as the engine will see it.

    ``tokens`` are its token ids (unsigned 32 bit), ``keys`` its content keys: 16 bytes for every whole
    16 tokens, in order, one after the other.
    """

    tokens: array[int]
    keys: bytes

    @property
    def token_count(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA adapter a request asks for by name: the model that it is laid over, and the digest of its content,
    empty where no worker says what it holds."""

    name: str
    model: str
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """Every prompt of a request: one for a chat, one or more for completions.

    ``reads_cache`` is False where the engine computes every token anew, as it must to give the prompt's logprobs.
    The keys are those of ``adapter`` (None: of the model itself), and none where its content is not known.
    """

    prompts: tuple[RenderedPrompt, ...]
    reads_cache: bool = True
    adapter: Adapter | None = None

    @property
    def token_count(self) -> int:
        """Prompt tokens over all prompts, as an engine reports them in ``usage``."""
        return sum(prompt.token_count for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Unrenderable:
    """The tokens are not known here, so nothing is predicted. ``reason`` is a short stable label for metrics."""

    reason: str
    detail: str


RenderOutcome = RenderedRequest | Unrenderable


class UnrenderableError(Exception):
    """Raised inside this package where exact rendering is impossible; becomes an Unrenderable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ContextLengthError(ValueError):
    """The prompt alone is longer than any worker of the model accepts."""

    def __init__(self, context_tokens_max: int, found: str) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens_max} tokens, but the prompt has {found}. "
            "Shorten the prompt."
        )
        self.context_tokens_max = context_tokens_max
