"""The connector's halves: what is saved is what is loaded, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from kvd.client.connection import ClientConnection
from kvd.protocol import Message, decode_json
from tests.inside_vllm.rig import BLOCK_TOKENS, Daemon, Engine, new_step, request, running_step, serve, wait_for

TOKENS = list(range(1000, 1000 + 5 * BLOCK_TOKENS + 7))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    made.clean_up()


def metrics(daemon: Daemon) -> dict[str, int]:
    connection = ClientConnection.open(daemon.socket)
    try:
        return dict(decode_json(connection.call(Message.STATUS, b""))["metrics"])
    finally:
        connection.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_one_engine_are_loaded_by_another(daemon: Daemon, ranks: int) -> None:
    one, other = Engine(daemon, ranks, seed=1), Engine(daemon, ranks, seed=2)
    assert serve(one, TOKENS, [3, 9, 4, 1, 5, 8]) == (0, set())
    assert serve(other, TOKENS, [11, 2, 13, 7, 21, 6]) == (5 * BLOCK_TOKENS, set())
    for saved, loaded in zip(one.blocks([3, 9, 4, 1, 5]), other.blocks([11, 2, 13, 7, 21]), strict=True):
        assert torch.equal(saved, loaded)
    assert one.pins() == other.pins() == 0
    one.close()
    other.close()


def test_block_is_present_only_when_every_rank_has_saved(daemon: Daemon) -> None:
    one, other = Engine(daemon, 2), Engine(daemon, 2)
    asked = request(TOKENS)
    one.scheduler.matched_tokens(asked, 0)
    orders = one.scheduler.orders(new_step([(asked, [1, 2, 3, 4, 5, 6], 0, len(TOKENS))]))
    one.step(orders, ranks=[0])
    assert other.scheduler.matched_tokens(request(TOKENS), 0) == 0
    one.step(orders, ranks=[1])
    assert other.scheduler.matched_tokens(request(TOKENS), 0) == 5 * BLOCK_TOKENS


def test_whole_prompt_cached_leaves_a_token_to_compute(daemon: Daemon) -> None:
    engine = Engine(daemon)
    exact = TOKENS[: 4 * BLOCK_TOKENS]
    serve(engine, exact, [1, 2, 3, 4])
    assert engine.scheduler.matched_tokens(request(exact), 0) == 3 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request([*exact, 1]), 0) == 4 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request([*exact, 1]), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request(exact[:BLOCK_TOKENS]), 0) == 0


def test_salt_adapter_and_image_requests_do_not_mix(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, [1, 2, 3, 4, 5, 6], salt="a")
    assert engine.scheduler.matched_tokens(request(TOKENS, "a"), 0) == 5 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request(TOKENS, "b"), 0) == 0
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == 0
    assert engine.scheduler.matched_tokens(request(TOKENS, "a", lora_request=object()), 0) == 0
    assert engine.scheduler.matched_tokens(request(TOKENS, "a", mm_features=[object()]), 0) == 0


def test_unverified_draft_tokens_are_never_saved(daemon: Daemon) -> None:
    engine = Engine(daemon)
    asked = request(TOKENS[: BLOCK_TOKENS + 30])
    engine.scheduler.matched_tokens(asked, 0)
    engine.step(engine.scheduler.orders(new_step([(asked, [1, 2], 0, BLOCK_TOKENS + 30)])))
    # Five drafts are computed beyond the tokens known: the second block is full, but not of facts.
    orders = engine.scheduler.orders(running_step([(asked, None, BLOCK_TOKENS + 29, 6)]))
    assert orders.saves == []
    asked.all_token_ids = TOKENS[: BLOCK_TOKENS + 33]
    asked.num_tokens = len(asked.all_token_ids)
    orders = engine.scheduler.orders(running_step([(asked, [3], BLOCK_TOKENS + 32, 1)]))
    assert [order.block_ids for order in orders.saves] == [[2]]


def test_preempted_request_saves_from_its_new_blocks(daemon: Daemon) -> None:
    engine = Engine(daemon)
    asked = request(TOKENS)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.orders(new_step([(asked, [1, 2, 3], 0, 2 * BLOCK_TOKENS)]))  # lost with the preemption
    resumed = running_step([(asked, [21, 22, 23, 24, 25, 26], 0, len(TOKENS))], {asked.request_id})
    orders = engine.scheduler.orders(resumed)
    assert orders.saves[0].block_ids == [21, 22, 23, 24, 25]


def test_lmcache_3388_record_that_vanished_after_the_look_up_is_recomputed(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, [1, 2, 3, 4, 5, 6])
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    assert found == 5 * BLOCK_TOKENS
    one.clients[0]._call(Message.DROP, b'{"namespace":"' + one.spec.namespace.hex().encode() + b'"}')
    other.scheduler.allocated(asked, [1, 2, 3, 4, 5, 6], found)
    orders = other.scheduler.orders(new_step([(asked, [1, 2, 3, 4, 5, 6], found, 7)]))
    assert other.step(orders) == {1, 2, 3, 4, 5}
    assert other.pins() == 0


def test_vllm_54363_right_length_wrong_bytes_is_caught_and_dropped(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, [1, 2, 3, 4, 5, 6])
    flip_a_bit_of_every_page(daemon)
    more = list(range(9000, 9000 + 3 * BLOCK_TOKENS))
    asked, neighbour = request(TOKENS), request(more)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.matched_tokens(neighbour, 0)
    other.scheduler.allocated(asked, [1, 2, 3, 4, 5, 6], found)
    step = new_step([(asked, [1, 2, 3, 4, 5, 6], found, 7), (neighbour, [7, 8, 9], 0, len(more))])
    stored_before = metrics(daemon)["stored_total"]
    assert other.step(other.scheduler.orders(step)) == {1, 2, 3, 4, 5}
    assert metrics(daemon)["stored_total"] == stored_before, "what was computed beside bad blocks is not saved"
    wait_for(lambda: metrics(daemon)["damaged_total"] == 5, "the damaged records are dropped")
    # vllm#49176: the next request is not sent into the same failure again.
    assert other.scheduler.matched_tokens(request(TOKENS), 0) == 0
    orders = other.scheduler.orders(running_step([(neighbour, None, len(more) - 1, 1)]))
    assert orders.saves[0].block_ids == [7, 8, 9], "held-back saves are made up for"


def flip_a_bit_of_every_page(daemon: Daemon) -> None:
    with daemon.data_file().open("r+b", buffering=0) as file:
        for offset in range(50, daemon.data_file().stat().st_size, 4096):
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("memory", "failed"), [("8M", set()), ("16M", {1, 2, 3, 4, 5})])
def test_daemon_killed_between_look_up_and_load(daemon: Daemon, memory: str, failed: set[int]) -> None:
    """Its successor takes the arena over and the load is served; with another arena, the old slots mean nothing."""
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, [1, 2, 3, 4, 5, 6])
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, [1, 2, 3, 4, 5, 6], found)
    orders = other.scheduler.orders(new_step([(asked, [1, 2, 3, 4, 5, 6], found, 7)]))
    daemon.kill()
    daemon.memory = memory
    daemon.start()
    wait_for(lambda: other.clients[1].connects_total == 2, "the worker is connected to the new daemon")
    assert other.step(orders) == failed
    if not failed:
        for saved, loaded in zip(one.blocks([1, 2, 3, 4, 5]), other.blocks([1, 2, 3, 4, 5]), strict=True):
            assert torch.equal(saved, loaded)


def test_without_a_daemon_everything_is_a_miss(daemon: Daemon) -> None:
    daemon.kill()
    engine = Engine(daemon)
    assert serve(engine, TOKENS, [1, 2, 3, 4, 5, 6]) == (0, set())
    daemon.start()
    wait_for(lambda: all(client.session() for client in engine.clients), "engines find a daemon started later")
    serve(engine, TOKENS, [1, 2, 3, 4, 5, 6])
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == 5 * BLOCK_TOKENS


def test_lmcache_1034_nothing_leaks_over_thousands_of_requests(daemon: Daemon) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    engine = Engine(daemon, 2)
    prompts = [[p * 100_000 + i for i in range(chance.randrange(1, 8 * BLOCK_TOKENS))] for p in range(200)]
    for _ in range(2000):
        tokens = chance.choice(prompts)
        asked = request(tokens)
        found = engine.scheduler.matched_tokens(asked, 0)
        blocks = chance.sample(range(1, 60), len(tokens) // BLOCK_TOKENS + 1)
        fate = chance.random()
        if fate < 0.1:  # aborted while waiting
            engine.scheduler.finished(asked.request_id)
            continue
        engine.scheduler.allocated(asked, blocks, found)
        orders = engine.scheduler.orders(new_step([(asked, blocks, found, len(tokens) - found)]))
        if fate < 0.2:  # aborted while its step runs
            engine.scheduler.finished(asked.request_id)
        assert engine.step(orders) == set()
        engine.scheduler.finished(asked.request_id)
    assert engine.pins() == 0
    assert engine.scheduler._states == {}
    assert engine.scheduler._loads == {}
    facts = metrics(daemon)
    assert (facts["reservations"], facts["quarantined_bytes"], facts["records_incomplete"]) == (0, 0, 0)
    assert facts["evicted_total"] > 0, "the arena was too large to show anything"
