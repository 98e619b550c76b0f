"""dynamo#737: one system prompt sent everything to one of eight workers.

Every request begins with the same system prompt, the rest is its own. The one worker that has the prefix first must
not get all the work, and the prefix must not be computed again and again.
"""

from __future__ import annotations

import random

import pytest

from tests.support.simulated_fleet import Request, SimulatedFleet, new_blocks

WORKERS, REQUESTS = 8, 2_000
SYSTEM_TOKENS, OWN_TOKENS = 2_048, 512
RATE = 5_000.0
SEED = 737


@pytest.mark.parametrize("routers", [1, 4])
def test_nobody_is_starved_or_flooded(routers: int) -> None:
    print(f"seed {SEED}")
    fleet = SimulatedFleet([RATE] * WORKERS, seed=SEED, routers=routers)
    dice = random.Random(SEED)
    system = new_blocks(SYSTEM_TOKENS)
    now = 0.0
    for _ in range(REQUESTS):
        now += dice.expovariate(0.8 * WORKERS * RATE / OWN_TOKENS)
        request = Request(system + new_blocks(OWN_TOKENS), output_tokens=32, router=dice.randrange(routers))
        fleet.submit(now, request)
    outcome = fleet.run(now + 100)
    assert sum(fleet.served) == REQUESTS
    assert min(fleet.served) > 0.8 * REQUESTS / WORKERS
    assert max(fleet.served) < 1.2 * REQUESTS / WORKERS
    # The best a balanced fleet can do: each worker computes the system prompt once, and all hit it from then on. While
    # it is computed for the first time, requests that are under way cannot hit it: two more each are allowed for.
    best = outcome.possible_hit_tokens - (WORKERS - 1) * SYSTEM_TOKENS
    assert outcome.hit_tokens >= best - 2 * WORKERS * SYSTEM_TOKENS
    assert fleet.in_flight() == 0
