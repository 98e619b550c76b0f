"""What the engine says it did, compared with what was predicted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from infera.router.decision import Decision
from infera.server.state import ServerState

MODELS_WARNED_MAX: Final = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Prompt tokens, and how many of them came from a cache (None where the engine does not say)."""

    prompt_tokens: int
    cached_tokens: int | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Usage in any of the shapes engines answer with: chats and completions, responses, messages."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def usage_of_answer(body: bytes) -> ReportedUsage | None:
    """The usage in a complete answer; None where there is none."""
    try:
        usage = _DECODER.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _reported(usage) if usage is not None else None


def usage_of_fields(usage: dict[str, Any]) -> ReportedUsage | None:
    """The usage in a stream's last frame."""
    try:
        return _reported(msgspec.convert(usage, _Usage))
    except msgspec.ValidationError:
        return None


def _reported(usage: _Usage) -> ReportedUsage | None:
    if usage.prompt_tokens is not None:
        details = usage.prompt_tokens_details
        return ReportedUsage(usage.prompt_tokens, details.cached_tokens if details else None)
    if usage.input_tokens is None:
        return None
    if usage.input_tokens_details is not None:
        return ReportedUsage(usage.input_tokens, usage.input_tokens_details.cached_tokens)
    # Anthropic's input_tokens are those that no cache was read from or written to for.
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return ReportedUsage(usage.input_tokens + (read or 0) + (written or 0), read)


def compare(state: ServerState, model: str, chosen: Decision, rendered_tokens: int | None, real: ReportedUsage) -> None:
    """Count predicted against real, and name a model whose prompts we get wrong, once."""
    metrics = state.metrics
    metrics.prompt_tokens.labels(model, "reported").inc(real.prompt_tokens)
    if real.cached_tokens is not None:
        metrics.cached_tokens.labels(model, "reported").inc(real.cached_tokens)
        state.fleet.computed(chosen.worker, real.prompt_tokens - real.cached_tokens)
    if rendered_tokens is None:
        return
    metrics.prompt_tokens.labels(model, "predicted").inc(rendered_tokens)
    metrics.cached_tokens.labels(model, "predicted").inc(chosen.cached_tokens)
    if rendered_tokens == real.prompt_tokens:
        return
    metrics.mismatches.labels(model).inc()
    if model not in state.models_mismatched and len(state.models_mismatched) < MODELS_WARNED_MAX:
        state.models_mismatched.add(model)
        _log.warning(
            "prompt: model %s: we rendered %d tokens, worker %s counted %d: prefix routing of this model is not exact; "
            "check that --router-tokenizer-path and the engine's chat template are the same",
            model,
            rendered_tokens,
            chosen.worker_id,
            real.prompt_tokens,
        )
