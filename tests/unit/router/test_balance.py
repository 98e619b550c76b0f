"""Placement over time: real routers, simulated engines, simulated time. Seeds are printed.

The bound on hits: `possible_hit_tokens` counts, for every request, the longest prefix that anybody had sent before,
wherever. No placement can hit more (nobody can hold what was never sent), and one worker with an endless cache and
all the time in the world would hit exactly that. It is an upper bound only: several workers must each compute what
they share once, and a request that comes while its prefix is still being computed elsewhere has to compute it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.simulated_fleet import Request, SimulatedFleet, largest_share_in_windows, new_blocks

SEED = 20
SYSTEM = new_blocks(1_024)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def agents(fleet: SimulatedFleet, sessions: int, rounds: int = 12) -> list[list[Request]]:
    """Sessions that share a system prompt; each round adds to the last one after a pause. Their requests, in order."""
    dice = random.Random(SEED)
    told: list[list[Request]] = [[] for _ in range(sessions)]

    def go_on(number: int, blocks: tuple[int, ...]) -> Callable[[float], None]:
        def send(now: float) -> None:
            if len(told[number]) == rounds:
                return
            longer = blocks + new_blocks(dice.randrange(256, 1_600))
            router = dice.randrange(len(fleet.routers))
            request = Request(longer, dice.randrange(20, 120), router, on_done=go_on(number, longer))
            told[number].append(request)
            fleet.submit(now + dice.uniform(0.5, 5), request)

        return send

    for number in range(sessions):
        start_s = dice.uniform(0, 30)
        fleet.at(start_s, lambda number=number, start_s=start_s: go_on(number, SYSTEM)(start_s))  # type: ignore[misc]
    return told


def stream(fleet: SimulatedFleet, rate: float, seconds: float, tokens: int = 1_024) -> None:
    """Unrelated prompts at random times."""
    dice, now = random.Random(SEED), 0.0
    while now < seconds:
        now += dice.expovariate(rate)
        fleet.submit(now, Request(new_blocks(tokens), 32, dice.randrange(len(fleet.routers))))


@pytest.mark.parametrize(("routers", "sessions"), [(1, 96), (1, 220), (4, 96), (4, 220)])
def test_paced_agent_sessions(routers: int, sessions: int) -> None:
    """At a third and at three quarters of what the fleet can do, by one router and by four without shared state."""
    print(f"seed {SEED}")
    fleet = SimulatedFleet([5_000.0] * 8, seed=SEED, routers=routers)
    agents(fleet, sessions)
    outcome = fleet.run(400)
    assert sum(fleet.served) == sessions * 12
    assert outcome.hit_tokens >= 0.97 * outcome.possible_hit_tokens
    # Sessions differ in length and are few, so even a perfect placement is not even.
    assert min(fleet.served) >= (0.5 if sessions == 220 else 0.25) * mean(fleet.served)
    assert max(fleet.served) <= (1.5 if sessions == 220 else 2.2) * mean(fleet.served)
    assert fleet.in_flight() == 0


def test_cached_prefixes_are_worth_the_trouble() -> None:
    """Against the policies that do not look at prefixes: half their hits are lost, and most of their time."""
    print(f"seed {SEED}")
    found = {}
    for policy in ("kv-aware", "least-loaded", "round-robin", "random"):
        fleet = SimulatedFleet([5_000.0] * 8, seed=SEED, policy=policy)
        agents(fleet, 96)
        found[policy] = fleet.run(400)
    best = found.pop("kv-aware")
    for outcome in found.values():
        assert best.mean_first_token_s < outcome.mean_first_token_s / 4
        assert best.hit_tokens > 1.5 * outcome.hit_tokens


def test_four_routers_without_shared_state_do_not_herd() -> None:
    """Unrelated prompts at 0.7 of the fleet's speed: only load to go by, and each router sees a quarter."""
    print(f"seed {SEED}")
    found = {}
    for routers in (1, 4):
        fleet = SimulatedFleet([20_000.0] * 8, seed=SEED, routers=routers)
        stream(fleet, 0.7 * 8 * 20_000 / 1_024, 40)
        found[routers] = fleet.run(80)
        assert min(fleet.served) > 0.85 * mean(fleet.served)
        assert max(fleet.served) < 1.15 * mean(fleet.served)
        # A herd would send one worker most of a second's hundred picks.
        assert largest_share_in_windows(found[routers].picks, 1.0, least=60) < 0.3
    # Placing at random gives a queue of rho / (1 - rho) / 2 = 1.2 prompts on average; a herd gives many times that.
    random_wait = 1.2 * 1_024 / 20_000
    assert found[1].mean_first_token_s < 1_024 / 20_000 + 0.5 * random_wait
    assert found[4].mean_first_token_s < 1_024 / 20_000 + 1.5 * random_wait


@pytest.mark.parametrize("routers", [1, 4])
def test_heterogeneous_workers_get_work_by_their_speed(routers: int) -> None:
    """Two twice as fast, two half as fast, all said to be alike: what each computes follows what it can."""
    print(f"seed {SEED}")
    speeds = [20_000.0, 20_000.0, 40_000.0, 40_000.0, 10_000.0, 10_000.0, 20_000.0, 20_000.0]
    fleet = SimulatedFleet(speeds, seed=SEED, routers=routers)
    stream(fleet, 0.7 * sum(speeds) / 1_024, 60)
    outcome = fleet.run(120)
    total = sum(engine.computed_tokens for engine in fleet.engines)
    for engine, speed in zip(fleet.engines, speeds, strict=True):
        share = engine.computed_tokens / total / (speed / sum(speeds))
        assert 0.5 < share < 1.4, "neither starved nor flooded"
    assert max(outcome.first_token_s) < 2.0, "ten prompts' time at the slowest"


@pytest.mark.parametrize("routers", [1, 4])
def test_a_worker_slowed_four_times_and_recovering(routers: int) -> None:
    """While slow it gets what it can do, and not nothing; a minute after it recovered it has its share again."""
    print(f"seed {SEED}")
    fleet = SimulatedFleet([20_000.0] * 8, seed=SEED, routers=routers)
    stream(fleet, 0.6 * 8 * 20_000 / 3_072, 240, tokens=3_072)
    slow = fleet.engines[0]
    shares: dict[str, float] = {}

    def measure(name: str, start_s: float, end_s: float) -> None:
        picks = [number for time_s, number in fleet.outcome.picks if start_s <= time_s < end_s]
        shares[name] = picks.count(0) / len(picks) * 8

    fleet.at(60, lambda: setattr(slow, "slowdown", 4.0))
    fleet.at(150, lambda: setattr(slow, "slowdown", 1.0))
    outcome = fleet.run(260)
    for name, start_s, end_s in (("before", 0, 60), ("slow", 70, 150), ("recovered", 200, 240)):
        measure(name, start_s, end_s)
    assert 0.8 < shares["before"] < 1.2
    # It can do a quarter of its speed, and its full share is 0.6 of that speed. One router sees its queue and stays
    # below; four see a quarter of it each, load it fully, and hold it there.
    assert 0.05 < shares["slow"] < (0.8 if routers == 1 else 1.1) * 0.25 / 0.6
    assert 0.8 < shares["recovered"] < 1.2
    # A prompt takes 0.6 s there while it is slow: nobody is sent behind a long queue.
    assert max(outcome.first_token_s) < (2.0 if routers == 1 else 8.0)


def test_prefixes_that_do_not_fit_are_not_fought_over() -> None:
    """Caches that hold a fraction of all sessions: still better than not looking, and nobody is flooded."""
    print(f"seed {SEED}")
    found = {}
    for policy in ("kv-aware", "least-loaded"):
        fleet = SimulatedFleet([5_000.0] * 8, seed=SEED, policy=policy, cache_blocks=600)
        agents(fleet, 96)
        found[policy] = fleet.run(600)
        assert max(fleet.served) <= 2.0 * mean(fleet.served)
    assert found["kv-aware"].hit_tokens > 1.2 * found["least-loaded"].hit_tokens
