"""A pick that explains itself, and the ring that remembers the last ones.

A pick keeps its numbers as one flat table; they become words only when somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from infera.router.field import Field
from infera.router.place import Place
from infera.router.scoring import CostTable, Row

REQUESTS_MAX: Final = 2_048
ROWS_MAX: Final = 65_536
ATTEMPTS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Decision:
    """One pick: all candidates with their numbers, which one was taken and why."""

    policy: str
    reason: str
    field: Field
    costs: CostTable
    chosen_index: int
    time_s: float
    passed_over: tuple[tuple[Place, str], ...] = ()
    """Places that were no candidates, and why."""

    @property
    def place(self) -> Place:
        """Where the request goes."""
        return self.field.place(self.chosen_index)

    @property
    def worker(self) -> str:
        """The incarnation of the chosen worker."""
        return self.place.record.incarnation

    @property
    def worker_id(self) -> str:
        """The chosen worker's name for people."""
        return self.place.worker_id

    @property
    def dp_rank(self) -> int:
        """The chosen rank."""
        return self.place.dp_rank

    @property
    def row(self) -> Row:
        """What was known of that place."""
        return self.field.row(self.chosen_index)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens predicted to be cached there."""
        return round(self.row.cached_tokens)

    def explain(self) -> dict[str, Any]:
        """The pick as JSON values."""
        return {
            "policy": self.policy,
            "reason": self.reason,
            "chosen": self.place.worker_id,
            "dp_rank": self.place.dp_rank,
            "candidates": [self._explain(index) for index in range(len(self.field))],
            "passed_over": [
                {"worker": place.worker_id, "dp_rank": place.dp_rank, "reason": reason}
                for place, reason in self.passed_over
            ],
        }

    def _explain(self, index: int) -> dict[str, Any]:
        option, row, cost = self.field.options[index], self.field.row(index), self.costs[index]
        tiers = {"hbm": row.hbm_tokens, "ram": row.ram_tokens, "disk": row.disk_tokens, "peer": row.peer_tokens}
        return {
            "worker": option.place.worker_id,
            "dp_rank": option.place.dp_rank,
            "prompt_tokens": round(row.prompt_tokens),
            "cached_tokens": {tier: round(tokens) for tier, tokens in tiers.items() if tokens},
            "is_guess": option.is_guess,
            "uncached_tokens": round(row.uncached_tokens),
            "queued_prefill_tokens": round(row.queued_prefill_tokens),
            "other_prefill_tokens": round(row.other_prefill_tokens),
            "active_requests": round(row.active_requests, 2),
            "context_tokens": round(row.context_tokens),
            "busy_share": round(row.busy_share, 3),
            "kv_used_tokens": round(row.kv_used_tokens),
            "kv_capacity_tokens": round(row.kv_capacity_tokens) or None,
            "prefill_tokens_per_s": round(1 / row.prefill_s_per_token) if row.prefill_s_per_token else None,
            "speed_factor": round(row.factor, 3),
            "predicted_s": {
                "queue": round(cost.queue_s, 6),
                "prefill": round(cost.prefill_s, 6),
                "load": round(cost.load_s, 6),
                "decode": round(cost.decode_s, 6),
                "total": round(cost.total_s, 6),
            },
            "delay_of_others_s": round(cost.delay_s, 6),
            "cost_s": round(cost.cost_s, 6),
        }


@dataclass(slots=True)
class PickStory:
    """One pick of a request, and how it ended."""

    decision: Decision
    outcome: str = "under way"
    facts: dict[str, Any] = field(default_factory=dict)

    def explain(self) -> dict[str, Any]:
        """The attempt as JSON values."""
        return {**self.decision.explain(), "outcome": self.outcome, **self.facts}


@dataclass(slots=True)
class RequestStory:
    """All that happened to one request: how long it waited, its picks, and how each ended."""

    model: str
    prompt: dict[str, Any]
    attempts: list[PickStory] = field(default_factory=list)
    waited_s: float = 0.0

    def explain(self) -> dict[str, Any]:
        """The story as JSON values."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "waited_s": round(self.waited_s, 6),
            "attempts": [attempt.explain() for attempt in self.attempts],
        }


class DecisionRing:
    """The stories of the last requests by request id; the oldest goes first.

    Bounded in requests and in rows (a pick among many workers takes more memory than one among few).
    """

    def __init__(self, requests_max: int = REQUESTS_MAX, rows_max: int = ROWS_MAX) -> None:
        self._requests_max = requests_max
        self._rows_max = rows_max
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()
        self.row_count = 0

    def __len__(self) -> int:
        return len(self._stories)

    def open(self, request_id: str, story: RequestStory) -> None:
        """Remember a request; a reused id replaces the older one."""
        self._drop(request_id)
        self._stories[request_id] = story
        self.row_count += _rows(story)
        self._shrink()

    def add(self, request_id: str, decision: Decision) -> PickStory:
        """Note a pick of a request; the returned attempt can be completed with its outcome."""
        attempt = PickStory(decision)
        story = self._stories.get(request_id)
        if story is not None and len(story.attempts) < ATTEMPTS_MAX:
            story.attempts.append(attempt)
            self.row_count += _size(decision)
            self._shrink()
        return attempt

    def get(self, request_id: str) -> RequestStory | None:
        """The story, if it is still remembered."""
        return self._stories.get(request_id)

    def _shrink(self) -> None:
        while len(self._stories) > self._requests_max or (self.row_count > self._rows_max and len(self._stories) > 1):
            self._drop(next(iter(self._stories)))

    def _drop(self, request_id: str) -> None:
        story = self._stories.pop(request_id, None)
        if story is not None:
            self.row_count -= _rows(story)


def _rows(story: RequestStory) -> int:
    return sum(_size(attempt.decision) for attempt in story.attempts)


def _size(decision: Decision) -> int:
    return len(decision.field) + len(decision.passed_over)
