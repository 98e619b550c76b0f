"""The fleet as the router sees it: who serves which model, who is suspect, what each holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.interface import Match, Target
from infera.discovery.record import WorkerRecord
from infera.prompt.outcome import RenderedRequest
from infera.router.core import Option

DEFAULT_RANK: Final = 0
SILENT_BLOCKS: Final = 8


@dataclass(slots=True)
class FleetWorker:
    """One worker with what this router found out about it."""

    record: WorkerRecord
    is_suspect: bool = False
    suspect_reason: str = ""
    failures: int = 0
    computed_tokens: int = 0
    """Prompt tokens the engine says it computed for us, so blocks must have been stored."""

    @property
    def state(self) -> str:
        """One word for people."""
        return "suspect" if self.is_suspect else "ready"


@dataclass(slots=True)
class Fleet:
    """Workers by incarnation. A suspect worker is used only when no other is left, until its next heartbeat."""

    cache: FleetCache
    workers: dict[str, FleetWorker] = field(default_factory=dict)

    def add(self, record: WorkerRecord) -> None:
        """A worker joined."""
        self.workers[record.incarnation] = FleetWorker(record)
        self.cache.add_worker(record)

    def change(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """A worker's record is another now; where it publishes may have changed."""
        self.cache.change_worker(old, new)
        self.workers[new.incarnation].record = new

    def beat(self, record: WorkerRecord) -> None:
        """A worker said that it is alive, so it is trusted again."""
        self.workers[record.incarnation].is_suspect = False

    def remove(self, record: WorkerRecord) -> None:
        """A worker left."""
        if self.workers.pop(record.incarnation, None) is not None:
            self.cache.remove_worker(record)

    def suspect(self, incarnation: str, reason: str) -> None:
        """A worker refused or broke a connection."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            worker.is_suspect = True
            worker.suspect_reason = reason
            worker.failures += 1

    def computed(self, incarnation: str, tokens: int) -> None:
        """A worker reported that it computed prompt tokens."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            worker.computed_tokens += max(0, tokens)

    def silent_workers(self) -> list[FleetWorker]:
        """Workers that should publish events and computed many blocks without a single one."""
        return [
            worker
            for worker in self.workers.values()
            if worker.record.events is not None
            and worker.computed_tokens > SILENT_BLOCKS * (worker.record.block_size_tokens or 1)
            and not self.cache.has_seen_events(worker.record)
        ]

    def models(self) -> dict[str, WorkerRecord]:
        """Every name that can be asked for (model names and aliases) with one record that serves it."""
        names: dict[str, WorkerRecord] = {}
        for worker in self.workers.values():
            for name in (worker.record.model, *worker.record.aliases):
                names.setdefault(name, worker.record)
        return names

    def serving(self, name: str) -> list[FleetWorker]:
        """Workers that answer requests for a model or alias on their own."""
        return [
            worker
            for worker in self.workers.values()
            if worker.record.role == "mixed" and (name == worker.record.model or name in worker.record.aliases)
        ]

    def options(self, workers: Iterable[FleetWorker], request: RenderedRequest | None) -> list[Option]:
        """Every rank of every worker with what it holds of the request; without tokens nothing is matched."""
        places = [(worker, rank) for worker in workers for rank in _ranks(worker.record)]
        matches = self._matches(places, request)
        lengths = tuple(prompt.token_count for prompt in request.prompts) if request else ()
        return [
            Option(worker.record, rank, matches[index], lengths, worker.is_suspect)
            for index, (worker, rank) in enumerate(places)
        ]

    def _matches(
        self, places: Sequence[tuple[FleetWorker, int]], request: RenderedRequest | None
    ) -> list[tuple[Match, ...]]:
        found: list[list[Match]] = [[] for _ in places]
        if request is not None:
            targets: list[Target] = []
            positions: list[int] = []
            for index, (worker, rank) in enumerate(places):
                target = self.cache.target(worker.record, rank)
                if target is not None:
                    targets.append(target)
                    positions.append(index)
            for prompt in request.prompts:
                by_place = dict(zip(positions, self.cache.match(prompt.keys, targets), strict=True))
                for index, matches in enumerate(found):
                    matches.append(by_place.get(index, Match()))
        return [tuple(matches) for matches in found]


def _ranks(record: WorkerRecord) -> list[int]:
    if record.events is None:
        return [DEFAULT_RANK]
    return [rank.dp_rank for rank in record.events.ranks]
