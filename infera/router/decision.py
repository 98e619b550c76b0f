"""A pick that explains itself, and the ring that remembers the last ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from infera.router.cost import Candidate, Cost

RING_DEFAULT: Final = 2048
ATTEMPTS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Decision:
    """One pick: all candidates with their numbers, which one was taken and why."""

    policy: str
    reason: str
    candidates: tuple[Candidate, ...]
    costs: tuple[Cost, ...] | None
    chosen_index: int
    time_s: float

    @property
    def chosen(self) -> Candidate:
        """The candidate that was taken."""
        return self.candidates[self.chosen_index]

    def explain(self) -> dict[str, Any]:
        """The pick as JSON values."""
        return {
            "policy": self.policy,
            "reason": self.reason,
            "chosen": self.chosen.worker_id,
            "dp_rank": self.chosen.dp_rank,
            "candidates": [self._explain(index) for index in range(len(self.candidates))],
        }

    def _explain(self, index: int) -> dict[str, Any]:
        candidate = self.candidates[index]
        told: dict[str, Any] = {
            "worker": candidate.worker_id,
            "dp_rank": candidate.dp_rank,
            "prompt_tokens": candidate.prompt_tokens,
            "cached_tokens": {tier.name.lower(): tokens for tier, tokens in candidate.cached_tokens_by_tier},
            "uncached_tokens": candidate.uncached_tokens,
            "queued_prefill_tokens": round(candidate.queued_prefill_tokens),
            "active_requests": candidate.active_requests,
            "decode_context_tokens": candidate.decode_context_tokens,
        }
        if self.costs is not None:
            cost = self.costs[index]
            told["predicted_s"] = {
                "queue": round(cost.queue_s, 6),
                "prefill": round(cost.prefill_s, 6),
                "load": round(cost.load_s, 6),
                "decode": round(cost.decode_s, 6),
                "total": round(cost.total_s, 6),
            }
        return told


@dataclass(slots=True)
class RequestStory:
    """All that happened to one request: its picks, and how each ended."""

    model: str
    prompt: dict[str, Any]
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, decision: Decision) -> dict[str, Any]:
        """Note a pick; the returned entry can be completed with the outcome."""
        entry = {**decision.explain(), "outcome": "under way"}
        if len(self.attempts) < ATTEMPTS_MAX:
            self.attempts.append(entry)
        return entry


class DecisionRing:
    """The stories of the last requests by request id; the oldest goes first."""

    def __init__(self, size: int = RING_DEFAULT) -> None:
        self._size = size
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()

    def open(self, request_id: str, story: RequestStory) -> None:
        """Remember a request; a reused id replaces the older one."""
        self._stories[request_id] = story
        self._stories.move_to_end(request_id)
        while len(self._stories) > self._size:
            self._stories.popitem(last=False)

    def get(self, request_id: str) -> RequestStory | None:
        """The story, if it is still remembered."""
        return self._stories.get(request_id)
