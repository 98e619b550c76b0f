"""Placement over time: real routers, simulated engines, simulated time, several seeds.

The bound on hits: `possible_hit_tokens` counts, for every request, the longest prefix that anybody had sent before,
wherever. No placement can hit more (nobody can hold what was never sent), and one worker with an endless cache and
all the time in the world would hit exactly that. It is an upper bound only: several workers must each compute what
they share once, and a request that comes while its prefix is still being computed elsewhere has to compute it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.simulated_fleet import Request, SimulatedFleet, largest_share_in_windows, new_blocks

SEEDS = (20, 22, 7)
SYSTEM = new_blocks(1_024)
# One router; four of one host, which share their loads; four that know nothing of each other.
ALONE, TOGETHER, STRANGERS = (1, False), (4, True), (4, False)


@pytest.fixture(params=SEEDS, autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    print(f"seed {request.param}")
    return int(request.param)


def make_fleet(speeds: list[float], seed: int, routers: tuple[int, bool] = ALONE, **more: Any) -> SimulatedFleet:
    count, shares_load = routers
    return SimulatedFleet(speeds, seed=seed, routers=count, shares_load=shares_load, **more)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def agents(fleet: SimulatedFleet, seed: int, sessions: int, rounds: int = 12) -> list[list[Request]]:
    """Sessions that share a system prompt; each round adds to the last one after a pause. Their requests, in order."""
    dice = random.Random(seed)
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


def stream(fleet: SimulatedFleet, seed: int, rate: float, seconds: float, tokens: int = 1_024) -> None:
    """Unrelated prompts at random times."""
    dice, now = random.Random(seed), 0.0
    while now < seconds:
        now += dice.expovariate(rate)
        fleet.submit(now, Request(new_blocks(tokens), 32, dice.randrange(len(fleet.routers))))


@pytest.mark.parametrize("sessions", [96, 220])
@pytest.mark.parametrize("routers", [ALONE, TOGETHER, STRANGERS])
def test_paced_agent_sessions(seed: int, routers: tuple[int, bool], sessions: int) -> None:
    """At a third and at three quarters of what the fleet can do."""
    fleet = make_fleet([5_000.0] * 8, seed, routers)
    agents(fleet, seed, sessions)
    outcome = fleet.run(400)
    assert sum(fleet.served) == sessions * 12
    assert outcome.hit_tokens >= 0.98 * outcome.possible_hit_tokens
    assert max(fleet.served) <= 1.5 * mean(fleet.served)
    # At a third of its speed a fleet has no need to be even: sessions stay where they are, and nobody waits for it.
    assert min(fleet.served) >= (0.85 if sessions == 220 else 0.15) * mean(fleet.served)
    assert fleet.in_flight() == 0


@pytest.mark.parametrize("sessions", [96, 220])
def test_four_routers_of_one_host_place_sessions_as_well_as_one(seed: int, sessions: int) -> None:
    found = {}
    for routers in (ALONE, TOGETHER):
        fleet = make_fleet([5_000.0] * 8, seed, routers)
        agents(fleet, seed, sessions)
        found[routers] = fleet.run(400)
    assert found[TOGETHER].mean_first_token_s < 1.12 * found[ALONE].mean_first_token_s
    # Sessions go on when their answers come, so the two runs' prompts are not the same.
    alone, together = (found[one].hit_tokens / found[one].possible_hit_tokens for one in (ALONE, TOGETHER))
    assert together > 0.995 * alone


def test_four_routers_of_one_host_place_long_prompts_almost_as_well_as_one(seed: int) -> None:
    """At 0.9 of the fleet's speed, where whoever sees a quarter of each queue makes prompts wait twice as long."""
    found = {}
    for routers in (ALONE, TOGETHER, STRANGERS):
        fleet = make_fleet([20_000.0] * 8, seed, routers)
        stream(fleet, seed, 0.9 * 8 * 20_000 / 4_096, 60, tokens=4_096)
        found[routers] = fleet.run(120)
    assert found[TOGETHER].mean_first_token_s < 1.3 * found[ALONE].mean_first_token_s
    assert found[TOGETHER].mean_first_token_s < 0.75 * found[STRANGERS].mean_first_token_s


def test_cached_prefixes_are_worth_the_trouble(seed: int) -> None:
    """Against the policies that do not look at prefixes: half their hits are lost, and most of their time."""
    found = {}
    for policy in ("kv-aware", "least-loaded", "round-robin", "random"):
        fleet = make_fleet([5_000.0] * 8, seed, policy=policy)
        agents(fleet, seed, 96)
        found[policy] = fleet.run(400)
    best = found.pop("kv-aware")
    for outcome in found.values():
        assert best.mean_first_token_s < outcome.mean_first_token_s / 4
        assert best.hit_tokens > 1.5 * outcome.hit_tokens


@pytest.mark.parametrize("routers", [ALONE, TOGETHER, STRANGERS])
def test_routers_do_not_herd(seed: int, routers: tuple[int, bool]) -> None:
    """Unrelated prompts at 0.7 of the fleet's speed: only load to go by; a stranger sees a quarter of it."""
    fleet = make_fleet([20_000.0] * 8, seed, routers)
    stream(fleet, seed, 0.7 * 8 * 20_000 / 1_024, 40)
    outcome = fleet.run(80)
    assert min(fleet.served) > 0.85 * mean(fleet.served)
    assert max(fleet.served) < 1.15 * mean(fleet.served)
    # A herd would send one worker most of a second's hundred picks.
    assert largest_share_in_windows(outcome.picks, 1.0, least=60) < 0.3
    # Placing at random gives a queue of rho / (1 - rho) / 2 = 1.2 prompts on average; a herd gives many times that.
    random_wait = 1.2 * 1_024 / 20_000
    assert outcome.mean_first_token_s < 1_024 / 20_000 + (1.5 if routers == STRANGERS else 0.5) * random_wait


@pytest.mark.parametrize("routers", [ALONE, TOGETHER, STRANGERS])
def test_heterogeneous_workers_get_work_by_their_speed(seed: int, routers: tuple[int, bool]) -> None:
    """Two twice as fast, two half as fast, all said to be alike: what each computes follows what it can."""
    speeds = [20_000.0, 20_000.0, 40_000.0, 40_000.0, 10_000.0, 10_000.0, 20_000.0, 20_000.0]
    fleet = make_fleet(speeds, seed, routers)
    stream(fleet, seed, 0.7 * sum(speeds) / 1_024, 60)
    outcome = fleet.run(120)
    total = sum(engine.computed_tokens for engine in fleet.engines)
    for engine, speed in zip(fleet.engines, speeds, strict=True):
        share = engine.computed_tokens / total / (speed / sum(speeds))
        assert 0.5 < share < 1.4, "neither starved nor flooded"
    assert max(outcome.first_token_s) < 2.0, "ten prompts' time at the slowest"


@pytest.mark.parametrize("routers", [ALONE, TOGETHER, STRANGERS])
def test_a_worker_slowed_four_times_and_recovering(seed: int, routers: tuple[int, bool]) -> None:
    """While slow it gets what it can do, and not nothing; a minute after it recovered it has its share again."""
    fleet = make_fleet([20_000.0] * 8, seed, routers)
    stream(fleet, seed, 0.6 * 8 * 20_000 / 3_072, 240, tokens=3_072)
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
    assert 0.75 < shares["before"] < 1.25
    # It can do a quarter of its speed, and its full share is 0.6 of that speed. Who sees its queue stays below;
    # strangers see a quarter of it each, load it fully, and hold it there.
    assert 0.05 < shares["slow"] < (1.1 if routers == STRANGERS else 0.8) * 0.25 / 0.6
    assert 0.75 < shares["recovered"] < 1.25
    # A prompt takes 0.6 s there while it is slow: nobody is sent behind a long queue.
    assert max(outcome.first_token_s) < (8.0 if routers == STRANGERS else 4.0)


def test_prefixes_that_do_not_fit_are_not_fought_over(seed: int) -> None:
    """Caches that hold a fraction of all sessions: still better than not looking, and nobody is flooded."""
    found = {}
    for policy in ("kv-aware", "least-loaded"):
        fleet = make_fleet([5_000.0] * 8, seed, policy=policy, cache_blocks=600)
        agents(fleet, seed, 96)
        found[policy] = fleet.run(600)
        assert max(fleet.served) <= 2.0 * mean(fleet.served)
    assert found["kv-aware"].hit_tokens > 1.2 * found["least-loaded"].hit_tokens
