from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

import pytest
from infera_core.keys import chain_keys, root_key

from infera.cachemap.fleet_cache import FleetCache, LocalIngest
from infera.cachemap.interface import Tier
from infera.discovery.record import EventRank, EventSource
from infera.prompt.outcome import Adapter, RenderedPrompt, RenderedRequest
from infera.router.fleet import Fleet
from infera.router.text_index import text_prompt
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
    assert isinstance(fleet.cache.ingest, LocalIngest)
    fleet.cache.ingest.reader.store(target.own_holder, Tier.HBM, [keys[:16], keys[16:32]])
    options = fleet.options(fleet.serving("m"), rendered(TOKENS, TOKENS[:20]))
    assert [option.place.dp_rank for option in options] == [0, 1]
    assert [[match.total_tokens for match in option.matches] for option in options] == [[0, 0], [32, 16]]
    assert options[1].prompt_lengths == (100, 20)


async def test_without_tokens_or_block_size_nothing_is_matched(fleet: Fleet) -> None:
    fleet.add(record(1, block_size_tokens=None))
    fleet.add(record(2, block_size_tokens=24))
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


async def test_a_request_that_was_just_sent_counts_before_any_event(fleet: Fleet) -> None:
    fleet.add(record(1))
    fleet.add(record(2))
    request = rendered(TOKENS)
    first = fleet.options(fleet.serving("m"), request)[0].place
    fleet.sent(first, request, None, now=0.0)
    found = {option.place.key: option.matches[0].total_tokens for option in fleet.options(fleet.serving("m"), request)}
    assert found == {first.key: 96, (record(2).incarnation, 0): 0}


async def test_a_request_that_reads_no_cache_predicts_no_hits(fleet: Fleet) -> None:
    fleet.add(record(1))
    request = rendered(TOKENS)
    fleet.sent(fleet.options(fleet.serving("m"), request)[0].place, request, None, now=0.0)
    anew = RenderedRequest(request.prompts, reads_cache=False)
    (option,) = fleet.options(fleet.serving("m"), anew)
    assert (option.matches[0].total_tokens, option.prompt_lengths) == (0, (100,))


async def test_without_events_or_tokens_what_is_held_is_guessed_and_says_so(fleet: Fleet) -> None:
    fleet.add(record(1, events=None))
    fleet.add(record(2))
    text = text_prompt("m", {"prompt": "once upon a time there was " * 100})
    blind, seen = (option.place for option in fleet.options(fleet.serving("m"), None, text, now=0.0))
    fleet.sent(blind, None, text, now=0.0)
    fleet.sent(seen, None, text, now=0.0)
    options = fleet.options(fleet.serving("m"), None, text, now=1.0)
    assert all(option.is_guess and option.matches[0].total_tokens > 600 for option in options)
    assert options[0].prompt_lengths == (675,)
    mixed = fleet.options(fleet.serving("m"), rendered(TOKENS), text, now=1.0)
    assert [option.is_guess for option in mixed] == [True, False]
    assert 90 < mixed[0].matches[0].total_tokens <= 100
    assert mixed[1].matches[0].total_tokens == 0


async def test_a_worker_that_changes_or_leaves_tells_which_places_are_gone(fleet: Fleet) -> None:
    ranks = tuple(EventRank(dp_rank=rank, pub=f"ipc:///{rank}") for rank in range(2))
    old = record(1, events=EventSource(topic="t", ranks=ranks))
    fleet.add(old)
    new = record(1, events=EventSource(topic="t", ranks=ranks[:1]))
    assert [place.dp_rank for place in fleet.change(old, new)] == [1]
    assert [place.dp_rank for place in fleet.remove(new)] == [0]
    assert fleet.remove(new) == []


ONE, OTHER = b"content 1", b"content 2"


def for_adapter(fleet: Fleet, name: str = "sql") -> RenderedRequest:
    """A request for an adapter, rendered as the server does."""
    adapter = fleet.adapter(name, fleet.serving(name))
    assert adapter is not None
    keys = chain_keys(root_key(lora=adapter.digest), TOKENS) if adapter.digest else b""
    return RenderedRequest((RenderedPrompt(TOKENS, keys),), adapter=adapter)


def held(fleet: Fleet, request: RenderedRequest, name: str = "sql") -> dict[str, int]:
    options = fleet.options(fleet.serving(name), request)
    return {option.place.worker_id: option.matches[0].total_tokens for option in options}


async def test_an_adapter_is_served_by_the_workers_that_have_it(fleet: Fleet) -> None:
    fleet.add(record(1, adapters={"sql": ONE.hex(), "a": ""}))
    fleet.add(record(2, aliases=("a",)))
    fleet.add(record(3, adapters={"sql": ONE.hex()}, role="prefill"))
    assert sorted(fleet.models()) == ["a", "m", "sql"]
    assert fleet.models()["a"].worker_id == "worker-2"
    assert [worker.record.worker_id for worker in fleet.serving("sql")] == ["worker-1"]
    assert fleet.adapter("sql", fleet.serving("sql")) == Adapter("sql", "m", ONE)
    assert [worker.record.worker_id for worker in fleet.serving("a")] == ["worker-2"], "a model's name comes first"
    assert fleet.adapter("a", fleet.serving("a")) is None
    assert fleet.adapter("m", fleet.serving("m")) is None


async def test_where_contents_differ_only_those_of_the_keys_are_matched(fleet: Fleet) -> None:
    """Also a worker that lays the adapter over another model, or cannot say what it has, is none of them."""
    for number, content in enumerate([ONE, ONE, OTHER], 1):
        fleet.add(record(number, adapters={"sql": content.hex()}))
    fleet.add(record(4, adapters={"sql": ""}))
    fleet.add(record(5, adapters={"sql": ONE.hex()}, model="n"))
    request = for_adapter(fleet)
    assert request.adapter == Adapter("sql", "m", ONE)
    for option in fleet.options(fleet.serving("sql"), request):
        fleet.sent(option.place, request, None, now=0.0)
    assert held(fleet, request) == {"worker-1": 96, "worker-2": 96, "worker-3": 0, "worker-4": 0, "worker-5": 0}
    text = text_prompt("m sql", {"prompt": "once upon a time there was " * 100})
    assert fleet.needs_text(fleet.serving("sql"), request)
    fleet.sent(fleet.workers[record(3).incarnation].places[0], request, text, now=0.0)
    options = fleet.options(fleet.serving("sql"), request, text, now=1.0)
    assert [(option.place.worker_id, option.is_guess) for option in options if option.is_guess] == [("worker-3", True)]


async def test_an_adapter_nobody_knows_the_content_of_is_never_matched(fleet: Fleet) -> None:
    fleet.add(record(1, adapters={"sql": ""}))
    request = for_adapter(fleet)
    fleet.sent(fleet.workers[record(1).incarnation].places[0], rendered(TOKENS), None, now=0.0)
    assert held(fleet, rendered(TOKENS), "m") == {"worker-1": 96}
    assert held(fleet, request) == {"worker-1": 0}


async def test_a_loras_requests_do_not_match_the_base_models_blocks(fleet: Fleet) -> None:
    """A species of failures.md: a LoRA's blocks matched the base model, here from the router's side."""
    fleet.add(record(1, adapters={"sql": ONE.hex()}))
    place = fleet.workers[record(1).incarnation].places[0]
    fleet.sent(place, rendered(TOKENS), None, now=0.0)
    assert held(fleet, for_adapter(fleet)) == {"worker-1": 0}
    fleet.sent(place, for_adapter(fleet), None, now=0.0)
    assert held(fleet, for_adapter(fleet)) == {"worker-1": 96}
    changed = record(1, adapters={"sql": OTHER.hex()})
    fleet.change(record(1, adapters={"sql": ONE.hex()}), changed)
    assert held(fleet, for_adapter(fleet)) == {"worker-1": 0}, "other content under the old name"
    assert held(fleet, rendered(TOKENS), "m") == {"worker-1": 96}, "the rest is still known"
