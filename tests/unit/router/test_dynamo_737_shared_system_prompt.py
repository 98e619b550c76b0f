"""dynamo#737: one system prompt sent everything to one of eight workers.

Eight workers in virtual time, every request begins with the same system prompt, the rest is its own. The one
worker that has the prefix first must not get all the work, and the prefix must not be computed again and again.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter

from infera.cachemap.interface import Match, Tier
from infera.router.core import Option, RouterCore
from infera.router.load import Ticket
from infera.router.policies.kv_aware import KvAware
from tests.support.records import record

WORKERS = 8
REQUESTS = 2_000
SYSTEM_TOKENS, OWN_TOKENS = 2_048, 512
RATE = 5_000.0


def test_nobody_is_starved_or_flooded() -> None:
    router = RouterCore(KvAware(), random.Random(737))
    holders: set[int] = set()
    busy_until = dict.fromkeys(range(WORKERS), 0.0)
    ends: list[tuple[float, int, Ticket, int]] = []
    served: Counter[int] = Counter()
    computed = 0
    arrivals = random.Random(1)
    now = 0.0
    for number in range(REQUESTS):
        now += arrivals.expovariate(0.8 * WORKERS * RATE / OWN_TOKENS)
        while ends and ends[0][0] <= now:
            at, _, ticket, worker = heapq.heappop(ends)
            router.first_token(ticket, now=at)
            router.done(ticket, now=at)
            holders.add(worker)
        options = [
            Option(
                record(worker + 1),
                0,
                (Match({Tier.HBM: SYSTEM_TOKENS} if worker in holders else {}),),
                (SYSTEM_TOKENS + OWN_TOKENS,),
            )
            for worker in range(WORKERS)
        ]
        decision, ticket = router.pick(options, now=now, is_streaming=True)
        worker = int(decision.chosen.worker_id.removeprefix("worker-")) - 1
        served[worker] += 1
        computed += decision.chosen.uncached_tokens
        busy_until[worker] = max(busy_until[worker], now) + decision.chosen.uncached_tokens / RATE
        heapq.heappush(ends, (busy_until[worker], number, ticket, worker))
    assert len(served) == WORKERS
    assert max(served.values()) < 2 * REQUESTS / WORKERS
    assert min(served.values()) > REQUESTS / WORKERS / 3
    assert computed < REQUESTS * OWN_TOKENS + 6 * WORKERS * SYSTEM_TOKENS
