from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.fleet_cache import FleetCache
from infera.cachemap.interface import Tier
from infera.discovery.record import EventRank, EventSource
from infera.prompt.outcome import RenderedPrompt, RenderedRequest
from infera.router.fleet import Fleet
from tests.support.records import record

TOKENS = array("I", range(100))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    cache = FleetCache()
    yield Fleet(cache)
    await cache.close()


def rendered(*prompts: array[int]) -> RenderedRequest:
    return RenderedRequest(tuple(RenderedPrompt(tokens, chain_keys(root_key(), tokens)) for tokens in prompts))


async def test_models_and_aliases_are_served_by_mixed_workers(fleet: Fleet) -> None:
    fleet.add(record(1, aliases=("a",)))
    fleet.add(record(2, role="decode"))
    assert sorted(fleet.models()) == ["a", "m"]
    assert [worker.record.worker_id for worker in fleet.serving("m")] == ["worker-1"]
    assert len(fleet.serving("a")) == 1
    assert not fleet.serving("b")
    fleet.remove(record(1))
    fleet.remove(record(1))
    assert not fleet.serving("m")


async def test_every_rank_is_a_place_of_its_own(fleet: Fleet) -> None:
    ranks = tuple(EventRank(dp_rank=rank, pub=f"ipc:///{rank}") for rank in range(2))
    made = record(1, events=EventSource(topic="t", ranks=ranks))
    fleet.add(made)
    target = fleet.cache.target(made, 1)
    assert target is not None
    assert target.own_holder is not None
    keys = chain_keys(root_key(), TOKENS)
    fleet.cache.map.store(target.own_holder, Tier.HBM, [keys[:16], keys[16:32]])
    options = fleet.options(fleet.serving("m"), rendered(TOKENS, TOKENS[:20]))
    assert [option.dp_rank for option in options] == [0, 1]
    assert [[match.total_tokens for match in option.matches] for option in options] == [[0, 0], [32, 16]]
    assert options[1].prompt_lengths == (100, 20)


async def test_without_tokens_or_block_size_nothing_is_matched(fleet: Fleet) -> None:
    fleet.add(record(1, block_size_tokens=None))
    fleet.add(record(2, block_size_tokens=8))
    assert all(fleet.cache.target(worker.record, 0) is None for worker in fleet.serving("m"))
    options = fleet.options(fleet.serving("m"), rendered(TOKENS))
    assert all(option.matches[0].total_tokens == 0 for option in options)
    assert [option.matches for option in fleet.options(fleet.serving("m"), None)] == [(), ()]


async def test_suspicion_ends_with_the_next_heartbeat(fleet: Fleet) -> None:
    fleet.add(record(1))
    fleet.suspect(record(1).incarnation, "refused")
    assert fleet.serving("m")[0].state == "suspect"
    fleet.beat(record(1))
    assert fleet.serving("m")[0].state == "ready"
    fleet.suspect("unknown", "refused")
