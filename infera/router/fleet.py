"""The fleet as the router sees it: who serves which model, who is suspect, what each holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.interface import Match, Target, Tier
from infera.discovery.record import WorkerRecord
from infera.prompt.outcome import Adapter, RenderedRequest
from infera.router.place import Option, Place
from infera.router.text_index import TextIndex, TextPrompt

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
    places: tuple[Place, ...] = ()

    def __post_init__(self) -> None:
        self.places = tuple(Place(self.record, rank) for rank in _ranks(self.record))

    @property
    def is_blind(self) -> bool:
        """Whether what the worker holds can only be guessed."""
        return self.record.events is None

    @property
    def state(self) -> str:
        """One word for people."""
        return "suspect" if self.is_suspect else "ready"


@dataclass(slots=True)
class Fleet:
    """Workers by incarnation. A suspect worker is used only when no other is left, until its next heartbeat."""

    cache: FleetCache
    workers: dict[str, FleetWorker] = field(default_factory=dict)
    texts: TextIndex = field(default_factory=TextIndex)

    def add(self, record: WorkerRecord) -> None:
        """A worker joined."""
        self.workers[record.incarnation] = FleetWorker(record)
        self.cache.add_worker(record)

    def change(self, old: WorkerRecord, new: WorkerRecord) -> list[Place]:
        """A worker's record is another now; where it publishes may have changed. Returns places that are gone."""
        self.cache.change_worker(old, new)
        worker = self.workers[new.incarnation]
        before = worker.places
        worker.record = new
        worker.places = tuple(Place(new, rank) for rank in _ranks(new))
        left = {place.key for place in worker.places}
        return [place for place in before if place.key not in left]

    def beat(self, record: WorkerRecord) -> None:
        """A worker said that it is alive, so it is trusted again."""
        self.workers[record.incarnation].is_suspect = False

    def remove(self, record: WorkerRecord) -> list[Place]:
        """A worker left. Returns its places."""
        worker = self.workers.pop(record.incarnation, None)
        if worker is None:
            return []
        self.cache.remove_worker(record)
        return list(worker.places)

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
        """Every name that can be asked for (models, aliases, adapters) with one record that serves it."""
        names: dict[str, WorkerRecord] = {}
        for worker in self.workers.values():
            for name in (worker.record.model, *worker.record.aliases):
                names.setdefault(name, worker.record)
        for worker in self.workers.values():
            for name in worker.record.adapters:
                names.setdefault(name, worker.record)
        return names

    def serving(self, name: str) -> list[FleetWorker]:
        """Workers that answer requests for a model, an alias or else a LoRA adapter on their own."""
        alone = [worker for worker in self.workers.values() if worker.record.role == "mixed"]
        named = [worker for worker in alone if _is_model(worker.record, name)]
        return named or [worker for worker in alone if name in worker.record.adapters]

    def adapter(self, name: str, workers: Sequence[FleetWorker]) -> Adapter | None:
        """The adapter that a request for ``name`` to these workers asks for; None when the name is a model's.

        Where workers have different content under the name, it is what most of them have: the others are used, but
        nothing is predicted of them.
        """
        if not workers or _is_model(workers[0].record, name):
            return None
        known = Counter((worker.record.model, worker.record.adapters.get(name, "")) for worker in workers)
        model, digest = max(known, key=lambda entry: (bool(entry[1]), known[entry], entry))
        return Adapter(name, model, bytes.fromhex(digest))

    def options(
        self,
        workers: Iterable[FleetWorker],
        request: RenderedRequest | None,
        text: TextPrompt | None = None,
        *,
        now: float = 0.0,
    ) -> list[Option]:
        """Every rank of every worker with what it holds of the request.

        Without tokens, and for workers without events, what a place holds is guessed from ``text`` where that is
        given; without either nothing is matched.
        """
        places = [(worker, place) for worker in workers for place in worker.places]
        if request is None:
            return self._guessed(places, text, now)
        matches = self._matches([place for _, place in places], request)
        lengths = tuple(prompt.token_count for prompt in request.prompts)
        options = [
            Option(place, matches[index], lengths, worker.is_suspect) for index, (worker, place) in enumerate(places)
        ]
        if (
            text is None
            or len(lengths) != 1
            or not request.reads_cache
            or not any(_is_guessed(worker, request) for worker, _ in places)
        ):
            return options
        held = self.texts.match(text, (place.key for _, place in places), now)
        # A guess in bytes becomes tokens by the share of the prompt that it covers.
        scale = lengths[0] / max(1, text.token_count)
        for index, (worker, place) in enumerate(places):
            tokens = min(lengths[0], round(held.get(place.key, 0) * scale))
            if _is_guessed(worker, request) and tokens > matches[index][0].total_tokens:
                options[index] = Option(place, (Match({Tier.HBM: tokens}),), lengths, worker.is_suspect, True)
        return options

    @staticmethod
    def needs_text(workers: Iterable[FleetWorker], request: RenderedRequest) -> bool:
        """Whether what some worker holds of a request whose tokens are known must be guessed from its text."""
        return any(_is_guessed(worker, request) for worker in workers)

    def sent(self, place: Place, request: RenderedRequest | None, text: TextPrompt | None, *, now: float) -> None:
        """A request was sent to a place, which will hold its prefix soon: the next one with it may count on that."""
        if request is not None and _has_keys_of(place.record, request):
            for prompt in request.prompts:
                self.cache.predict(place.record, place.dp_rank, prompt.keys)
        if text is not None:
            self.texts.sent(text, place.key, now)

    def _guessed(
        self, places: Sequence[tuple[FleetWorker, Place]], text: TextPrompt | None, now: float
    ) -> list[Option]:
        if text is None:
            return [Option(place, (), (), worker.is_suspect, True) for worker, place in places]
        held = self.texts.match(text, (place.key for _, place in places), now)
        return [
            Option(place, (Match({Tier.HBM: held.get(place.key, 0)}),), (text.token_count,), worker.is_suspect, True)
            for worker, place in places
        ]

    def _matches(self, places: Sequence[Place], request: RenderedRequest) -> list[tuple[Match, ...]]:
        if not request.reads_cache:
            return [(NO_MATCH,) * len(request.prompts)] * len(places)
        targets: list[Target] = []
        positions: list[int] = []
        for index, place in enumerate(places):
            target = self.cache.target(place.record, place.dp_rank)
            if target is not None and _has_keys_of(place.record, request):
                targets.append(target)
                positions.append(index)
        by_prompt = []
        for prompt in request.prompts:
            found = self.cache.match(prompt.keys, targets)
            if len(targets) < len(places):
                known, found = found, [NO_MATCH] * len(places)
                for index, match in zip(positions, known, strict=True):
                    found[index] = match
            by_prompt.append(found)
        return list(zip(*by_prompt, strict=True))


NO_MATCH: Final = Match()


def _is_model(record: WorkerRecord, name: str) -> bool:
    return name == record.model or name in record.aliases


def _has_keys_of(record: WorkerRecord, request: RenderedRequest) -> bool:
    """Whether the worker would compute the request with what its keys say: the same adapter, not just its name."""
    adapter = request.adapter
    if adapter is None:
        return True
    has_content = bool(adapter.digest) and record.adapters.get(adapter.name) == adapter.digest.hex()
    return has_content and record.model == adapter.model


def _is_guessed(worker: FleetWorker, request: RenderedRequest) -> bool:
    return worker.is_blind or not _has_keys_of(worker.record, request)


def _ranks(record: WorkerRecord) -> list[int]:
    if record.events is None:
        return [DEFAULT_RANK]
    return [rank.dp_rank for rank in record.events.ranks]
