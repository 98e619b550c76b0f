"""A fleet in simulated time: engines with a prefill queue, decoding, a prefix cache and late news, and real routers.

Only the engines are made up; placement is `RouterCore` as it serves. Everything is decided by the seed. An engine
computes prompts one after the other, slower while many requests decode, keeps blocks least recently used out first,
and tells routers of stored and removed blocks a little later, and of its load with each heartbeat.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infera.cachemap.interface import Match, Tier
from infera.cachemap.load_table import BEAT_INTERVAL_S, LoadTable
from infera.discovery.record import RankLoad, WorkerRecord
from infera.router.affinity import SessionTable
from infera.router.core import RouterCore
from infera.router.decision import Decision
from infera.router.demand import Demand
from infera.router.load import Ticket
from infera.router.place import Option, Place
from infera.router.policy import OverlapWeights, PolicySettings, make_policy
from tests.support.records import record

BLOCK_TOKENS = 64
EVENT_DELAY_S = 0.05
HEARTBEAT_S = 2.0
TOKEN_S = 0.02
# Each decoding request takes this share of an engine's prefill speed away.
DECODE_DRAG = 0.01

_block_numbers = itertools.count()


def new_blocks(tokens: int) -> tuple[int, ...]:
    """Blocks of text that nobody has seen before."""
    return tuple(next(_block_numbers) for _ in range(tokens // BLOCK_TOKENS))


@dataclass(slots=True)
class Request:
    """A prompt as its blocks, and what is to be generated."""

    blocks: tuple[int, ...]
    output_tokens: int = 64
    router: int = 0
    session: bytes | None = None
    on_done: Callable[[float], None] | None = None
    arrived_s: float = 0.0
    worker: int = -1

    @property
    def prompt_tokens(self) -> int:
        """A last block is never complete."""
        return len(self.blocks) * BLOCK_TOKENS + 1


@dataclass(slots=True)
class Engine:
    """One simulated engine. ``slowdown`` may be changed at any time."""

    place: Place
    tokens_per_s: float
    cache_blocks: int = 1_000_000
    slowdown: float = 1.0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    known: set[int] = field(default_factory=set)
    """What routers know it holds."""
    waiting: deque[tuple[Request, Ticket, int]] = field(default_factory=deque)
    is_computing: bool = False
    decoding: int = 0
    served: int = 0
    computed_tokens: int = 0
    told_tokens: int = 0
    """The counter an engine shows: what it computed to the end."""
    longest_queue: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_hit_tokens: int = 0
    """Tokens of prefixes that had been sent anywhere before: what one worker with an endless cache would hit."""
    first_token_s: list[float] = field(default_factory=list)
    picks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def mean_first_token_s(self) -> float:
        """Mean time to the first token."""
        return sum(self.first_token_s) / len(self.first_token_s)


def make_router(seed: int, policy: str = "kv-aware", sessions: SessionTable | None = None) -> RouterCore:
    """A router that never refuses: a simulation has no clients that come back."""
    settings = PolicySettings(OverlapWeights())
    return RouterCore(make_policy(policy, settings), random.Random(seed), sessions=sessions, saturation_s=1e9)


class SimulatedFleet:
    """Engines, routers, and one clock."""

    def __init__(
        self,
        speeds: Sequence[float],
        *,
        seed: int,
        routers: int = 1,
        policy: str = "kv-aware",
        cache_blocks: int = 1_000_000,
        decode_drag: float = DECODE_DRAG,
        role: str = "mixed",
        shares_load: bool = False,
        **fields: object,
    ) -> None:
        """``speeds``: prompt tokens per second of each engine. With ``shares_load`` the routers are of one host."""
        self.now = 0.0
        self.random = random.Random(seed)
        self.routers = [make_router(seed + number, policy) for number in range(routers)]
        records: list[WorkerRecord] = [
            record(number + 1, block_size_tokens=BLOCK_TOKENS, role=role, **fields) for number in range(len(speeds))
        ]
        self.engines = [Engine(Place(made), speed, cache_blocks) for made, speed in zip(records, speeds, strict=True)]
        self.outcome = Outcome()
        self.role = role
        self._decode_drag = decode_drag
        self._seen: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.load_table = LoadTable() if shares_load else None
        if self.load_table is not None:
            for router in self.routers:
                lane = self.load_table.claim()
                assert lane is not None
                router.peers.tend(self.load_table.lane(lane), {}, 0.0)
            self.at(0.0, self._tell_alive)
        for number in range(len(self.engines)):
            self.at(HEARTBEAT_S * number / len(self.engines), lambda number=number: self._beat(number))  # type: ignore[misc]

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (time_s, next(self._count), action))

    def submit(self, time_s: float, request: Request) -> None:
        """A client sends a request at a time."""
        self.at(time_s, lambda: self._arrive(request))

    def run(self, until_s: float) -> Outcome:
        """Let time pass."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until_s
        return self.outcome

    @property
    def served(self) -> list[int]:
        """Requests by engine."""
        return [engine.served for engine in self.engines]

    def in_flight(self) -> int:
        """Requests under way, by the routers' accounts."""
        return sum(router.loads.ticket_count for router in self.routers)

    def _arrive(self, request: Request) -> None:
        request.arrived_s = self.now
        router = self.routers[request.router]
        options = [
            Option(engine.place, (Match({Tier.HBM: BLOCK_TOKENS * run_length(request.blocks, engine.known)}),),
                   (request.prompt_tokens,))
            for engine in self.engines
        ]  # fmt: skip
        demand = Demand(model="m", role=self.role, session=request.session)  # type: ignore[arg-type]
        decision, ticket = router.pick(options, demand, now=self.now)
        self._send(request, decision, ticket)

    def _send(self, request: Request, decision: Decision, ticket: Ticket) -> None:
        number = next(n for n, engine in enumerate(self.engines) if engine.place.key == decision.place.key)
        request.worker = number
        engine = self.engines[number]
        engine.served += 1
        outcome = self.outcome
        outcome.picks.append((self.now, number))
        outcome.prompt_tokens += request.prompt_tokens
        outcome.possible_hit_tokens += BLOCK_TOKENS * run_length(request.blocks, self._seen)
        self._seen.update(request.blocks)
        engine.waiting.append((request, ticket, request.router))
        engine.longest_queue = max(engine.longest_queue, len(engine.waiting))
        self._compute_next(engine)

    def _compute_next(self, engine: Engine) -> None:
        if engine.is_computing or not engine.waiting:
            return
        engine.is_computing = True
        request, ticket, router = engine.waiting.popleft()
        hit = run_length(request.blocks, engine.held)
        missing = request.prompt_tokens - hit * BLOCK_TOKENS
        self.outcome.hit_tokens += hit * BLOCK_TOKENS
        engine.computed_tokens += missing
        speed = engine.tokens_per_s / engine.slowdown / (1 + self._decode_drag * engine.decoding)
        duration_s = 0.002 + missing / speed
        self.at(self.now + duration_s, lambda: self._first_token(engine, request, ticket, router, missing))

    def _first_token(self, engine: Engine, request: Request, ticket: Ticket, router: int, computed: int) -> None:
        engine.is_computing = False
        engine.told_tokens += computed
        self.outcome.first_token_s.append(self.now - request.arrived_s)
        self.routers[router].first_token(ticket, now=self.now)
        self._store(engine, request.blocks)
        engine.decoding += 1
        duration_s = request.output_tokens * TOKEN_S * engine.slowdown
        self.at(self.now + duration_s, lambda: self._done(engine, request, ticket, router))
        self._compute_next(engine)

    def _done(self, engine: Engine, request: Request, ticket: Ticket, router: int) -> None:
        engine.decoding -= 1
        self.routers[router].done(ticket, now=self.now)
        if request.on_done is not None:
            request.on_done(self.now)

    def _store(self, engine: Engine, blocks: tuple[int, ...]) -> None:
        stored = [block for block in blocks if block not in engine.held]
        for block in reversed(blocks):
            engine.held[block] = None
            engine.held.move_to_end(block)
        removed = []
        while len(engine.held) > engine.cache_blocks:
            removed.append(engine.held.popitem(last=False)[0])

        def tell() -> None:
            engine.known.update(stored)
            engine.known.difference_update(removed)

        if stored or removed:
            self.at(self.now + EVENT_DELAY_S, tell)

    def _tell_alive(self) -> None:
        for router in self.routers:
            assert router.peers.lane is not None
            router.peers.lane.beat(self.now)
        self.at(self.now + BEAT_INTERVAL_S, self._tell_alive)

    def _beat(self, number: int) -> None:
        engine = self.engines[number]
        load = RankLoad(
            running_requests=engine.decoding + engine.is_computing,
            waiting_requests=len(engine.waiting),
            computed_tokens=engine.told_tokens,
        )
        for router in self.routers:
            router.report([engine.place], [load], now=self.now)
        self.at(self.now + HEARTBEAT_S, lambda: self._beat(number))


def run_length(blocks: tuple[int, ...], held: object) -> int:
    """How many blocks from the beginning are held."""
    count = 0
    for block in blocks:
        if block not in held:  # type: ignore[operator]
            break
        count += 1
    return count


def largest_share_in_windows(picks: Sequence[tuple[float, int]], window_s: float, least: int) -> float:
    """The largest share one engine got of the picks of any window with at least ``least`` of them."""
    windows: dict[int, Counter[int]] = defaultdict(Counter)
    for time_s, number in picks:
        windows[int(time_s / window_s)][number] += 1
    return max(max(window.values()) / window.total() for window in windows.values() if window.total() >= least)
