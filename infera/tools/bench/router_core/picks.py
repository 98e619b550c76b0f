"""What matching and picking cost with a full map and 64 workers."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from typing import Final

from infera_core import ffi, lib
from infera_core.keys import chain_keys, root_key

from infera.cachemap.interface import Target, Tier
from infera.cachemap.native_map import NativeCacheMap, pack_target
from infera.discovery.record import WorkerRecord
from infera.router.core import RouterCore
from infera.router.demand import Demand
from infera.router.place import Option, Place
from infera.router.policy import make_policy

WORKERS: Final = 64
PROMPTS: Final = 200
PROMPT_BLOCKS: Final = 256
LONG_TOKENS: Final = 131_072
FILL_BLOCKS: Final = 8_000


class Fleet64:
    """64 workers that all hold some prompts, and much else each."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.map = NativeCacheMap(6_000_000)
        self.holders = [self.map.add_holder(f"worker {number}") for number in range(WORKERS)]
        self.targets = [Target(1, holder) for holder in self.holders]
        self.prompts = [dice.randbytes(16 * PROMPT_BLOCKS) for _ in range(PROMPTS)]
        self.tokens = array("I", (dice.randrange(150_000) for _ in range(LONG_TOKENS)))
        for prompt in self.prompts:
            for holder in self.holders:
                self.map.store(holder, Tier.HBM, prompt)
        for holder in self.holders:
            self.map.store(holder, Tier.HBM, dice.randbytes(16 * FILL_BLOCKS))
        self.long_keys = chain_keys(root_key(), self.tokens)
        for number, holder in enumerate(self.holders):
            self.map.store(holder, Tier.HBM, self.long_keys[: 16 * 128 * (number + 1)])

    def match_us(self, rounds: int) -> list[float]:
        """One C call for a prompt of 256 blocks that all 64 hold whole, another prompt each time."""
        packed = b"".join(map(pack_target, self.targets))
        targets = ffi.cast("cachemap_target *", ffi.from_buffer(packed))
        found = ffi.new("cachemap_match[]", WORKERS)
        view = self.map.view_handle

        def call(number: int) -> None:
            lib.cachemap_match_all(view, self.prompts[number % PROMPTS], PROMPT_BLOCKS, targets, WORKERS, found)

        times = timed(call, rounds)
        assert all(match.grains[0] == PROMPT_BLOCKS for match in found)
        return [time_s * 1e6 for time_s in times]

    def keys_ms(self, rounds: int) -> list[float]:
        """The keys of 131,072 tokens."""
        return [time_s * 1e3 for time_s in timed(lambda _: chain_keys(root_key(), self.tokens), rounds)]

    def pick_ms(self, rounds: int) -> list[float]:
        """Tokens given: their keys, the match of 8,192 blocks at 64 workers, which hold between 128 and all of them,
        and the choice of one."""
        places = [Place(_record(number)) for number in range(WORKERS)]
        core = RouterCore(make_policy("kv-aware"), random.Random(1))

        def pick(number: int) -> None:
            matches = self.map.match(chain_keys(root_key(), self.tokens), self.targets)
            options = [Option(place, (match,), (LONG_TOKENS,)) for place, match in zip(places, matches, strict=True)]
            decision, ticket = core.pick(options, Demand(), now=float(number))
            assert decision.place in places
            core.done(ticket, now=float(number))

        return [time_s * 1e3 for time_s in timed(pick, rounds)]


def timed(call: Callable[[int], object], rounds: int) -> list[float]:
    """Seconds of each of ``rounds`` calls after a few that do not count."""
    for number in range(min(rounds, 5)):
        call(number)
    times = []
    for number in range(rounds):
        started_s = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - started_s)
    return times


def _record(number: int) -> WorkerRecord:
    return WorkerRecord(
        incarnation=f"{number:032x}",
        worker_id=f"worker-{number}",
        url=f"http://127.0.0.1:{10_000 + number}",
        engine="vllm",
        engine_version="1",
        model="m",
        block_size_tokens=16,
    )
