from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from infera.cachemap.interface import Match, Tier
from infera.router.core import NoWorkerError, Option, RouterCore, usable_tokens
from infera.router.policies.kv_aware import KvAware
from infera.router.policies.round_robin import RoundRobin
from infera.router.policy import UnknownPolicyError, find_policies, make_policy
from tests.support.records import record


def option(number: int, prompt: int = 1600, suspect: bool = False, **tiers: int) -> Option:
    match = Match({Tier[name.upper()]: tokens for name, tokens in tiers.items()})
    return Option(record(number), 0, (match,), (prompt,), suspect)


def core(policy: Any = None) -> RouterCore:
    return RouterCore(policy or KvAware(), random.Random(7))


def picked(router: RouterCore, options: list[Option], now: float = 0.0, **more: Any) -> str:
    decision, _ = router.pick(options, now=now, is_streaming=True, **more)
    return decision.chosen.worker_id


def test_the_worker_that_holds_the_prefix_is_picked() -> None:
    assert picked(core(), [option(1), option(2, hbm=1584), option(3, hbm=800)]) == "worker-2"


def test_memory_beats_nothing_and_hbm_beats_memory() -> None:
    assert picked(core(), [option(1), option(2, ram=1584)]) == "worker-2"
    assert picked(core(), [option(1, hbm=1584), option(2, ram=1584)]) == "worker-1"


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    router = core()
    for _ in range(20):
        router.pick(
            [
                option(1, hbm=1584),
            ],
            now=0.0,
            is_streaming=True,
        )
    router.pick([Option(record(1), 0, (Match(),), (20_000,))], now=0.0, is_streaming=True)
    assert picked(router, [option(1, hbm=1584), option(2)]) == "worker-2"


def test_equals_are_shared_at_random() -> None:
    router = core()
    counts: Counter[str] = Counter()
    for _ in range(400):
        decision, ticket = router.pick([option(1), option(2), option(3)], now=0.0, is_streaming=True)
        counts[decision.chosen.worker_id] += 1
        router.done(ticket, now=0.0)
    assert len(counts) == 3
    assert min(counts.values()) > 80


def test_dynamo_3581_equal_scores_do_not_flip_a_chat_between_workers() -> None:
    """dynamo#3581: with equal scores a chat's rounds went back and forth. The one that computes less is taken."""
    router = core()
    for round_number in range(50):
        held = 16 * (round_number % 3 + 1)
        assert picked(core(), [option(1, prompt=100), option(2, prompt=100, hbm=held)]) == "worker-2"
    assert router.loads.ticket_count == 0


def test_suspects_are_used_only_when_nobody_else_is_there() -> None:
    assert picked(core(), [option(1, suspect=True, hbm=1584), option(2)]) == "worker-2"
    assert picked(core(), [option(1, suspect=True)]) == "worker-1"


def test_nobody_to_pick() -> None:
    with pytest.raises(NoWorkerError):
        picked(core(), [])


def test_load_is_counted_from_pick_to_end_and_released_once() -> None:
    router = core()
    _, ticket = router.pick([option(1, hbm=1000)], now=0.0, is_streaming=True)
    load = router.loads.of(record(1).incarnation, 0)
    assert (load.active_requests, load.queued_prefill_tokens()) == (1, 600)
    router.first_token(ticket, now=0.1)
    assert load.queued_prefill_tokens() == 0
    assert load.decode_context_tokens() == 1600
    router.done(ticket, now=0.2)
    router.failed(ticket, now=0.2)
    assert router.loads.ticket_count == 0
    assert router.loads.of(record(1).incarnation, 0).active_requests == 0


def test_load_decays_in_time_and_not_with_picks() -> None:
    router = core()
    router.pick([option(1, prompt=5000)], now=0.0, is_streaming=True)
    queued = [_queue(router, now) for now in (0.0, 0.0, 0.0, 0.5, 0.5, 5.0, 50.0)]
    assert queued[0] == queued[1] == queued[2] == 5000
    assert queued[3] == queued[4] == 2500
    assert queued[5] == queued[6] == 500, "a stream without its first token is still busy"


def _queue(router: RouterCore, now: float) -> float:
    load = router.loads.of(record(1).incarnation, 0)
    load.drain(now, 5000.0)
    return load.queued_prefill_tokens()


def test_an_answer_that_is_not_streamed_stops_counting_as_prefill() -> None:
    router = core()
    router.pick([option(1, prompt=5000)], now=0.0, is_streaming=False)
    assert _queue(router, 10.0) == 0
    assert router.loads.of(record(1).incarnation, 0).decode_context_tokens() == 5000


@pytest.mark.parametrize(
    ("length", "held", "expected"), [(64, 64, 48), (65, 64, 64), (16, 16, 0), (0, 0, 0), (100, 32, 32)]
)
def test_the_last_token_is_always_computed(length: int, held: int, expected: int) -> None:
    found = usable_tokens(Option(record(1), 0, (Match({Tier.HBM: held}),), (length,)))
    assert sum(tokens for _, tokens in found) == expected


def test_the_last_block_is_taken_from_the_lowest_tier() -> None:
    found = usable_tokens(Option(record(1), 0, (Match({Tier.HBM: 32, Tier.RAM: 32}),), (64,)))
    assert found == ((Tier.HBM, 32), (Tier.RAM, 16))


def test_round_robin_takes_turns_through_joins_and_leaves() -> None:
    router = core(RoundRobin())
    options = [option(number) for number in (1, 2, 3)]
    assert [picked(router, options) for _ in range(6)] == ["worker-1", "worker-2", "worker-3"] * 2
    assert [picked(router, [options[0], options[2], option(4)]) for _ in range(3)] == [
        "worker-4",
        "worker-1",
        "worker-3",
    ]


def test_policies_are_found_by_name() -> None:
    assert {"kv-aware", "round-robin"} <= set(find_policies())
    assert make_policy("kv-aware").reads_prefixes
    assert not make_policy("round-robin").reads_prefixes
    with pytest.raises(UnknownPolicyError, match="kv-aware"):
        make_policy("best")


def test_a_decision_explains_itself() -> None:
    decision, _ = core().pick([option(1), option(2, hbm=160, ram=320)], now=0.0, is_streaming=True)
    told = decision.explain()
    assert told["chosen"] == "worker-2"
    second = told["candidates"][1]
    assert second["cached_tokens"] == {"hbm": 160, "ram": 320}
    assert second["predicted_s"]["total"] == pytest.approx(sum(second["predicted_s"].values()) / 2, abs=1e-5)
