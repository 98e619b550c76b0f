"""Predicted seconds until a request's first token, for each worker it could go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from infera.cachemap.interface import Tier


@dataclass(frozen=True, slots=True)
class CostPrior:
    """What is assumed about engines before anything is learned. Rates in tokens per second."""

    prefill_tokens_per_s: float = 5_000.0
    load_tokens_per_s: tuple[tuple[Tier, float], ...] = (
        (Tier.RAM, 200_000.0),
        (Tier.DISK, 50_000.0),
        (Tier.PEER, 50_000.0),
    )
    decode_s_per_request: float = 0.002
    decode_s_at_full_memory: float = 0.5


PRIOR: Final = CostPrior()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker's rank with everything that its cost is made of. Sizes in tokens."""

    worker: str
    worker_id: str
    dp_rank: int
    prompt_tokens: int
    cached_tokens_by_tier: tuple[tuple[Tier, int], ...] = ()
    queued_prefill_tokens: float = 0.0
    active_requests: int = 0
    decode_context_tokens: int = 0
    kv_capacity_tokens: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be computed here."""
        return sum(tokens for _, tokens in self.cached_tokens_by_tier)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that have to be computed here."""
        return max(0, self.prompt_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Cost:
    """The parts of a prediction, in seconds."""

    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.prefill_s + self.load_s + self.decode_s


def predict_cost(candidate: Candidate, prior: CostPrior = PRIOR) -> Cost:
    """Time in queue, prefill of what nobody holds, load of what lies below, and the pressure of what decodes."""
    rates = dict(prior.load_tokens_per_s)
    load_s = sum(tokens / rates[tier] for tier, tokens in candidate.cached_tokens_by_tier if tier is not Tier.HBM)
    fill = 0.0
    if candidate.kv_capacity_tokens:
        fill = min(1.0, candidate.decode_context_tokens / candidate.kv_capacity_tokens)
    return Cost(
        queue_s=candidate.queued_prefill_tokens / prior.prefill_tokens_per_s,
        prefill_s=candidate.uncached_tokens / prior.prefill_tokens_per_s,
        load_s=load_s,
        decode_s=candidate.active_requests * prior.decode_s_per_request + fill**2 * prior.decode_s_at_full_memory,
    )
