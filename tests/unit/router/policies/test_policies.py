from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from infera.router.policies.kv_aware import KvAware
from infera.router.policy import OverlapWeights, PolicySettings, UnknownPolicyError, find_policies, make_policy
from tests.support.placement import STREAM, core, option, picked

NAMES = {"kv-aware", "round-robin", "least-loaded", "random", "session", "text-prefix"}


def test_policies_are_found_by_name() -> None:
    assert set(find_policies()) >= NAMES
    assert {name for name in NAMES if make_policy(name).reads_prefixes} == {"kv-aware"}
    assert {name for name in NAMES if make_policy(name).reads_text} == {"kv-aware", "text-prefix"}


@pytest.mark.parametrize(("name", "nearest"), [("kv_aware", "kv-aware"), ("roundrobin", "round-robin")])
def test_an_unknown_name_is_answered_with_the_nearest_and_all(name: str, nearest: str) -> None:
    with pytest.raises(UnknownPolicyError, match=f"did you mean {nearest}") as caught:
        make_policy(name)
    assert all(known in str(caught.value) for known in NAMES)
    with pytest.raises(UnknownPolicyError, match="there is no router policy 'zzz'"):
        make_policy("zzz")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_policy_serves_and_forgets(name: str) -> None:
    router = core(name)
    options = [option(number) for number in (1, 2, 3)]
    for turn in range(30):
        session = b"%d" % turn if turn % 2 else None
        assert picked(router, options, now=turn, demand=replace(STREAM, session=session)).startswith("worker-")
    router.forget([entry.place for entry in options])
    assert picked(router, options[:1], now=99.0) == "worker-1"


def test_round_robin_takes_turns_through_joins_and_leaves() -> None:
    router = core("round-robin")
    options = [option(number) for number in (1, 2, 3)]
    assert [picked(router, options) for _ in range(6)] == ["worker-1", "worker-2", "worker-3"] * 2
    assert [picked(router, [options[0], options[2], option(4)]) for _ in range(3)] == [
        "worker-4",
        "worker-1",
        "worker-3",
    ]


def test_least_loaded_does_not_look_at_what_is_held() -> None:
    router = core("least-loaded")
    router.pick([option(1)], STREAM, now=0.0)
    assert picked(router, [option(1, hbm=1584), option(2)]) == "worker-2"


def test_random_uses_everybody() -> None:
    router = core("random")
    counts = Counter(picked(router, [option(1, hbm=1584), option(2)]) for _ in range(200))
    assert min(counts.values()) > 60


def sessions(count: int) -> list[bytes]:
    return [b"session %d" % number for number in range(count)]


def test_a_session_policy_agrees_between_routers_and_moves_little() -> None:
    options = [option(number) for number in range(1, 9)]

    def homes(workers: list[int], seedless_router: int) -> dict[bytes, str]:
        del seedless_router
        router = core("session")
        chosen = [options[number - 1] for number in workers]
        return {name: picked(router, chosen, demand=replace(STREAM, session=name)) for name in sessions(400)}

    everybody = homes([1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert everybody == homes([8, 7, 6, 5, 4, 3, 2, 1], 2), "the order of workers does not matter"
    assert min(Counter(everybody.values()).values()) > 20
    fewer = homes([1, 2, 3, 4, 5, 6, 7], 1)
    moved = {name for name in everybody if everybody[name] != fewer[name]}
    assert moved == {name for name in everybody if everybody[name] == "worker-8"}


def test_a_session_passes_over_a_worker_with_more_than_its_share() -> None:
    router = core("session")
    options = [option(number) for number in (1, 2, 3)]
    demand = replace(STREAM, session=b"hot")
    home = picked(router, options, demand=demand)
    places = Counter(router.pick(options, demand, now=0.0)[0].worker_id for _ in range(60))
    assert places[home] == max(places.values())
    assert len(places) > 1
    assert max(places.values()) < 50


@pytest.mark.parametrize(
    ("weights", "role", "expected"),
    [
        (OverlapWeights(), "mixed", 1.0),
        (OverlapWeights(3.0), "decode", 3.0),
        (OverlapWeights(3.0, prefill=20.0), "prefill", 20.0),
        (OverlapWeights(3.0, prefill=20.0, decode=0.0), "decode", 0.0),
        (OverlapWeights(3.0, prefill=20.0, decode=0.0), "mixed", 3.0),
    ],
)
def test_overlap_weights_by_role(weights: OverlapWeights, role: str, expected: float) -> None:
    assert KvAware(PolicySettings(weights)).weights(role).overlap == expected  # type: ignore[arg-type]


def test_the_overlap_weight_is_a_bias_between_cache_and_load() -> None:
    def choice(weight: float) -> str:
        router = core(settings=PolicySettings(OverlapWeights(weight)))
        router.pick([option(1, prompt=2_000)], STREAM, now=0.0)
        return picked(router, [option(1, hbm=1584), option(2)])

    assert choice(20.0) == "worker-1"
    assert choice(1.0) == "worker-2", "2,000 tokens are waiting there, and only 1,584 would be saved"
    assert choice(0.0) == "worker-2"


def test_with_weight_zero_equals_are_shared_whatever_they_hold() -> None:
    router = core(settings=PolicySettings(OverlapWeights(0.0)))
    counts = Counter(picked(router, [option(1, hbm=1584), option(2)]) for _ in range(200))
    assert min(counts.values()) > 60
