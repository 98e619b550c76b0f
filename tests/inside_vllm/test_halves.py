"""The connector's halves: what is saved is what is loaded, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infera_vllm.faults import Fault, LoadFaults
from infera_vllm.request_keys import RequestKeys

from kvd.client.connection import ClientConnection
from kvd.protocol import Message, decode_json
from tests.inside_vllm.rig import (
    BLOCK_TOKENS,
    Daemon,
    Engine,
    matched,
    new_step,
    request,
    running_step,
    serve,
    wait_for,
    wait_for_load,
)

TOKENS = list(range(1000, 1000 + 5 * BLOCK_TOKENS + 7))
FIVE = 5 * BLOCK_TOKENS
HERE, THERE = [3, 9, 4, 1, 5, 8], [11, 2, 13, 7, 21, 6]


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


def drop_all(engine: Engine) -> None:
    engine.clients[0]._call(Message.DROP, b'{"namespace":"' + engine.plan.namespace.hex().encode() + b'"}')


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_blocks_of_one_engine_are_loaded_by_another(daemon: Daemon, ranks: int, groups: int) -> None:
    one, other = Engine(daemon, ranks, groups, seed=1), Engine(daemon, ranks, groups, seed=2)
    here = tuple([10 * g + block for block in HERE] for g in range(groups))
    there = tuple([10 * g + block for block in THERE] for g in range(groups))
    assert serve(one, TOKENS, here) == (0, set())
    assert serve(other, TOKENS, there) == (FIVE, set())
    for group, (saved_ids, loaded_ids) in enumerate(zip(here, there, strict=True)):
        first = 3 if group else 0  # a window of two blocks reads nothing before the fourth
        for saved, loaded in zip(
            one.blocks(saved_ids[first:5], group), other.blocks(loaded_ids[first:5], group), strict=True
        ):
            assert torch.equal(saved, loaded)
    assert one.pins() == other.pins() == 0
    one.close()
    other.close()


def test_llm_d_router_2362_a_window_that_misses_a_block_shortens_the_hit(daemon: Daemon) -> None:
    """Of a sliding window's group only what the window covers counts, and all of that."""
    engine = Engine(daemon, groups=2)
    serve(engine, TOKENS, (HERE, [20, 21, 22, 23, 24, 25]))
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == FIVE
    lose(daemon, engine, 1, 4)
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == 4 * BLOCK_TOKENS
    lose(daemon, engine, 1, 0)
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == 4 * BLOCK_TOKENS
    lose(daemon, engine, 0, 2)
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == 0, "two blocks need the window's first"


def lose(daemon: Daemon, engine: Engine, group: int, block: int) -> None:
    """One record of TOKENS is gone: it was damaged, and the daemon found out."""
    spec, client = engine.plan.groups[group].spec, engine.clients[0]
    keys = RequestKeys(request(TOKENS), None)
    keys.extend(TOKENS)
    key = keys.block_keys(BLOCK_TOKENS, block, block + 1)
    run = client.pin_run(spec, key)
    assert run is not None
    flip_a_bit(daemon, engine, run.slots[0])
    run.release()
    client.report_damaged(spec, key)
    wait_for(lambda: client.probe_run(spec, key) == 0, "the record is dropped")


def test_block_is_present_only_when_every_rank_has_saved(daemon: Daemon) -> None:
    """A block served to every rank from the one that wrote last: each rank has its shard, and all must be there."""
    one, other = Engine(daemon, 2), Engine(daemon, 2)
    asked = request(TOKENS)
    one.scheduler.matched_tokens(asked, 0)
    one.scheduler.allocated(asked, (HERE,), 0)
    orders = one.scheduler.orders(new_step([(asked, HERE, 0, len(TOKENS))]))
    one.step(orders, ranks=[0])
    assert one.workers[0]._saves.wait_until_idle(10)
    assert other.scheduler.matched_tokens(request(TOKENS), 0) == 0
    one.step(orders, ranks=[1])
    assert one.workers[1]._saves.wait_until_idle(10)
    wait_for(lambda: other.scheduler.matched_tokens(request(TOKENS), 0) == FIVE, "both shards are there")


def test_whole_prompt_cached_leaves_a_token_to_compute(daemon: Daemon) -> None:
    engine = Engine(daemon)
    exact = TOKENS[: 4 * BLOCK_TOKENS]
    serve(engine, exact, [1, 2, 3, 4])
    assert engine.scheduler.matched_tokens(request(exact), 0) == 3 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request([*exact, 1]), 0) == 4 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request([*exact, 1]), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert engine.scheduler.matched_tokens(request(exact[:BLOCK_TOKENS]), 0) == 0


def test_salts_adapters_and_images_do_not_mix(daemon: Daemon, tmp_path: Path) -> None:
    engine = Engine(daemon)
    adapters = [adapter(tmp_path / name, name, number) for number, name in enumerate("ab")]
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=3, length=40))
    kinds = [
        {"salt": "a"},
        {"salt": "b"},
        {"lora_request": adapters[0]},
        {"lora_request": adapters[1]},
        {"mm_features": [image]},
        {},
    ]
    for number, kind in enumerate(kinds):
        for before in kinds[:number]:
            assert matched(engine, request(TOKENS, **before)) == FIVE  # type: ignore[arg-type]
        assert matched(engine, request(TOKENS, **kind)) == 0  # type: ignore[arg-type]
        serve(engine, TOKENS, HERE, **kind)  # type: ignore[arg-type]


def test_an_adapter_with_other_weights_under_the_same_name_is_another(daemon: Daemon, tmp_path: Path) -> None:
    engine = Engine(daemon)
    asked = adapter(tmp_path, "old")
    serve(engine, TOKENS, HERE, lora_request=asked)
    assert found_for(engine, asked) == FIVE
    adapter(tmp_path, "new weights")
    # The engine may hold either: nothing is loaded or saved until it is loaded again, under another number.
    assert found_for(engine, asked) == 0
    again = adapter(tmp_path, "new weights", 2)
    assert found_for(engine, again) == 0
    serve(engine, TOKENS, THERE, lora_request=again)
    assert found_for(engine, again) == FIVE


def found_for(engine: Engine, lora: SimpleNamespace) -> int | None:
    asked = request(TOKENS, lora_request=lora)
    return matched(engine, asked)


def adapter(folder: Path, weights: str, number: int = 1) -> SimpleNamespace:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return SimpleNamespace(lora_name="mine", lora_path=str(folder), lora_int_id=number)


def test_what_keys_cannot_name_is_not_kept(daemon: Daemon, tmp_path: Path) -> None:
    engine = Engine(daemon)
    nowhere = SimpleNamespace(lora_name="x", lora_path=str(tmp_path / "none"), lora_int_id=9)
    for kind in ({"prompt_embeds": object()}, {"pooling_params": object()}, {"lora_request": nowhere}):
        assert serve(engine, TOKENS, HERE, **kind) == (0, set())
        assert serve(engine, TOKENS, HERE, **kind) == (0, set())
    assert metrics(daemon)["records_present"] == 0
    assert engine.scheduler._uncacheable == set(), "ids of finished requests are forgotten"


def test_terms_of_a_request(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE, kv_transfer_params={"infera_retention": "none"})
    assert metrics(daemon)["records_present"] == 0
    serve(engine, TOKENS, HERE, kv_transfer_params={"infera_retention": "long", "infera_ttl_seconds": 3600})
    assert metrics(daemon)["long_records"] == 5
    assert serve(engine, TOKENS, HERE, kv_transfer_params={"infera_no_load": True}) == (0, set())
    assert serve(engine, TOKENS, HERE, kv_transfer_params={"infera_retention": "forever"}) == (FIVE, set())


def test_the_client_is_told_where_its_tokens_came_from(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE)
    asked = request(TOKENS)
    found = engine.scheduler.matched_tokens(asked, 2 * BLOCK_TOKENS)
    engine.scheduler.allocated(asked, (HERE,), found)
    assert wait_for_load(engine, asked) == set()
    told = engine.scheduler.finished(asked)
    assert told == {"infera_hit_tokens": {"hbm": 2 * BLOCK_TOKENS, "ram": 3 * BLOCK_TOKENS}}


def test_unverified_draft_tokens_are_never_saved(daemon: Daemon) -> None:
    engine = Engine(daemon)
    asked = request(TOKENS[: BLOCK_TOKENS + 30])
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, ([1, 2],), 0)
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
    engine.scheduler.allocated(asked, ([1, 2, 3],), 0)
    engine.scheduler.orders(new_step([(asked, [1, 2, 3], 0, 2 * BLOCK_TOKENS)]))  # lost with the preemption
    resumed = running_step([(asked, [21, 22, 23, 24, 25, 26], 0, len(TOKENS))], {asked.request_id})
    orders = engine.scheduler.orders(resumed)
    assert orders.saves[0].block_ids == [21, 22, 23, 24, 25]


def test_lmcache_4385_a_block_used_again_is_not_saved_with_what_is_written_to_it(daemon: Daemon) -> None:
    """A save still under way when its block is given to another request."""
    engine, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    before = engine.blocks(HERE[:5])
    asked = request(TOKENS)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, (HERE,), 0)
    saves = engine.workers[0]._saves
    with Held(saves):  # its thread does not begin
        engine.step(engine.scheduler.orders(new_step([(asked, HERE, 0, len(TOKENS))])))
        engine.scheduler.finished(asked)
        neighbour = request(list(range(5000, 5000 + 2 * BLOCK_TOKENS)))
        engine.scheduler.matched_tokens(neighbour, 0)
        engine.scheduler.allocated(neighbour, ([9, 4, 40],), 0)
        orders = engine.scheduler.orders(new_step([(neighbour, [9, 4, 40], 0, 2 * BLOCK_TOKENS)]))
        assert set(orders.give_up) == {9, 4}

    def write() -> None:
        for cache in engine.caches:
            for tensor in cache.values():
                tensor[[9, 4]] = -1.0

    engine.step(orders, write)
    engine.settle()
    assert other.scheduler.matched_tokens(request(TOKENS), 0) in (0, BLOCK_TOKENS, FIVE)
    found, failed = serve(other, TOKENS, THERE)
    assert failed == set()
    for saved, loaded in zip(before, other.blocks(THERE[:5]), strict=True):
        assert torch.equal(saved[: found // BLOCK_TOKENS], loaded[: found // BLOCK_TOKENS])


class Held:
    """Keeps the thread of a worker's saves from taking anything."""

    def __init__(self, saves: object) -> None:
        self._saves = saves

    def __enter__(self) -> None:
        self._real = self._saves._save  # type: ignore[attr-defined]
        self._go = threading.Event()

        def wait(save: object) -> None:
            self._go.wait(20)
            self._real(save)

        self._saves._save = wait  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        self._saves._save = self._real  # type: ignore[attr-defined]
        self._go.set()


def test_saves_past_the_limit_are_dropped_and_counted(daemon: Daemon) -> None:
    engine = Engine(daemon)
    saves = engine.workers[0]._saves
    saves._waiting_blocks_max = 7
    with Held(saves):
        for number in range(4):
            asked = request([number * 1000 + i for i in range(5 * BLOCK_TOKENS)])
            engine.scheduler.matched_tokens(asked, 0)
            blocks = [10 * number + i for i in range(1, 6)]
            engine.scheduler.allocated(asked, (blocks,), 0)
            engine.step(engine.scheduler.orders(new_step([(asked, blocks, 0, 5 * BLOCK_TOKENS)])))
            wait_for(lambda: saves._current is not None, "the thread is at the first")
    engine.settle()
    stats = engine.workers[0].take_stats()
    assert stats is not None
    assert stats.data["saves_dropped_blocks:queue_full"] == 10
    assert metrics(daemon)["records_present"] == 10


def test_lmcache_3388_record_that_vanished_after_the_look_up_is_recomputed(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    assert found == FIVE
    drop_all(one)
    other.scheduler.allocated(asked, (THERE,), found)
    assert wait_for_load(other, asked) == set(THERE[:5])
    assert other.pins() == 0


def test_records_before_a_vanished_one_are_loaded(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    real, client = other.clients[0].pin_run, other.clients[0]
    client.pin_run = lambda spec, keys: real(spec, keys[: 3 * 16])  # type: ignore[method-assign]
    other.scheduler.allocated(asked, (THERE,), found)
    client.pin_run = real  # type: ignore[method-assign]
    assert wait_for_load(other, asked) == set(THERE[3:5])
    for saved, loaded in zip(one.blocks(HERE[:3]), other.blocks(THERE[:3]), strict=True):
        assert torch.equal(saved, loaded)
    assert other.pins() == 0


def test_sglang_30321_one_group_gone_between_look_up_and_load_fails_the_whole(daemon: Daemon) -> None:
    """Of two groups one was evicted: nothing of the other is used either, and the request is computed."""
    one, other = Engine(daemon, groups=2, seed=1), Engine(daemon, groups=2, seed=2)
    serve(one, TOKENS, (HERE, [20, 21, 22, 23, 24, 25]))
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    lose(daemon, one, 1, 4)
    other.scheduler.allocated(asked, (THERE, [30, 31, 32, 33, 34, 35]), found)
    assert wait_for_load(other, asked) == {0}
    assert other.failed == {asked.request_id}
    assert other.pins() == 0


def test_vllm_54363_right_length_wrong_bytes_is_caught_and_dropped(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    flip_a_bit_of_every_page(daemon)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, (THERE,), found)
    assert wait_for_load(other, asked) == set(THERE[:5])
    other.step(other.scheduler.orders(new_step([(asked, THERE, 0, len(TOKENS))])))
    wait_for(lambda: metrics(daemon)["damaged_total"] == 5, "the damaged records are dropped")
    # What is computed instead is saved at the latest a step later: the next request finds it.
    other.step(other.scheduler.orders(running_step([(asked, None, len(TOKENS) - 1, 1)])))
    other.settle()
    assert serve(one, TOKENS, HERE) == (FIVE, set())


def test_vllm_49176_a_request_whose_load_failed_does_not_load_again(daemon: Daemon) -> None:
    """The records are still there and still look right; only this request knows better."""
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2, faults=LoadFaults({1: Fault(fails=True)}))
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, (THERE,), found)
    assert wait_for_load(other, asked) == set(THERE[:5])
    for _ in range(3):
        assert other.scheduler.matched_tokens(asked, 0) == 0
    assert serve(other, TOKENS, THERE) == (FIVE, set()), "others do"


def test_a_damaged_block_costs_what_comes_after_it(daemon: Daemon) -> None:
    """Blocks before the damaged one hold what they should and stay in use."""
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, (THERE,), found)
    orders = other.scheduler.orders(new_step([]))
    flip_a_bit(daemon, other, orders.loads[0].groups[0].slots[2])
    other.step(orders)
    assert wait_for_load(other, asked) == set(THERE[2:5])
    for saved, loaded in zip(one.blocks(HERE[:2]), other.blocks(THERE[:2]), strict=True):
        assert torch.equal(saved, loaded)


def flip_a_bit(daemon: Daemon, engine: Engine, slot: int) -> None:
    session = engine.clients[0].session()
    assert session is not None
    place = session.arena.locate(slot, 0)
    assert place is not None
    with daemon.data_file().open("r+b", buffering=0) as file:
        file.seek(place.offset_bytes + 50)
        (byte,) = file.read(1)
        file.seek(place.offset_bytes + 50)
        file.write(bytes([byte ^ 1]))


def flip_a_bit_of_every_page(daemon: Daemon) -> None:
    with daemon.data_file().open("r+b", buffering=0) as file:
        for offset in range(50, daemon.data_file().stat().st_size, 4096):
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def test_vllm_45387_a_load_past_its_deadline_is_reported_and_writes_nothing_more(daemon: Daemon) -> None:
    one = Engine(daemon, seed=1)
    other = Engine(daemon, seed=2, faults=LoadFaults({1: Fault(delay_s=0.6)}), deadline_s=0.3)
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, (THERE,), found)
    before = other.blocks(THERE[:5])
    assert wait_for_load(other, asked) == set(THERE[:5])
    time.sleep(0.1)
    for was, is_now in zip(before, other.blocks(THERE[:5]), strict=True):
        assert torch.equal(was, is_now)
    assert other.pins() == 0


def test_loads_past_the_limit_of_their_queue_fail_at_once(daemon: Daemon) -> None:
    one = Engine(daemon, seed=1)
    other = Engine(daemon, seed=2, faults=LoadFaults({1: Fault(delay_s=0.5)}))
    serve(one, TOKENS, HERE)
    other.workers[0]._loads._queue.maxsize = 1
    asked = [request(TOKENS) for _ in range(4)]
    for number, each in enumerate(asked):
        found = other.scheduler.matched_tokens(each, 0)
        other.scheduler.allocated(each, ([10 * number + i for i in range(1, 7)],), found)
        other.step(other.scheduler.orders(new_step([])))
        if number == 0:
            wait_for(other.workers[0]._loads._queue.empty, "the first load begins")
    other.settle()
    assert other.loaded() == {each.request_id for each in asked}
    assert other.stats.data["loads:queue_full"] == 2
    assert other.pins() == 0


def test_a_rank_that_fails_fails_the_load(daemon: Daemon) -> None:
    one, other = Engine(daemon, 2, seed=1), Engine(daemon, 2, seed=2)
    other.workers[1]._loads._faults = LoadFaults({1: Fault(fails=True)})
    serve(one, TOKENS, HERE)
    found, failed = serve(other, TOKENS, THERE)
    assert (found, failed) == (FIVE, set(THERE[:5]))
    assert other.pins() == 0
    assert serve(other, TOKENS, THERE) == (FIVE, set())


def test_a_rank_that_cannot_copy_fails_its_loads_at_once_and_turns_the_cache_off(daemon: Daemon) -> None:
    one, other = Engine(daemon, 2, seed=1), Engine(daemon, 2, seed=2, unable_rank=1)
    serve(one, TOKENS, HERE)
    assert serve(other, TOKENS, THERE) == (FIVE, set(THERE[:5]))
    assert serve(other, TOKENS, THERE) == (0, set())
    assert other.pins() == 0


@pytest.mark.parametrize("when", ["ordered", "loading"])
def test_a_request_aborted_while_it_loads_keeps_its_pins_until_every_rank_is_done(daemon: Daemon, when: str) -> None:
    one = Engine(daemon, 2, seed=1)
    other = Engine(daemon, 2, seed=2, faults=LoadFaults({1: Fault(delay_s=0.2)}))
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    other.scheduler.allocated(asked, (THERE,), other.scheduler.matched_tokens(asked, 0))
    if when == "loading":
        other.step(other.scheduler.orders(new_step([])))
    other.scheduler.finished(asked)
    assert other.pins() == 5
    wait_for_load(other, asked)
    assert other.pins() == 0
    assert other.scheduler._states == {}


@pytest.mark.parametrize(("memory", "fails"), [("8M", False), ("16M", True)])
def test_daemon_killed_between_look_up_and_load(daemon: Daemon, memory: str, fails: bool) -> None:
    """Its successor takes the arena over and the load is served; with another arena, the old slots mean nothing."""
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    asked = request(TOKENS)
    found = other.scheduler.matched_tokens(asked, 0)
    other.scheduler.allocated(asked, (THERE,), found)
    orders = other.scheduler.orders(new_step([]))
    daemon.kill()
    daemon.memory = memory
    daemon.start()
    wait_for(lambda: other.clients[1].connects_total == 2, "the worker is connected to the new daemon")
    other.step(orders)
    assert wait_for_load(other, asked) == (set(THERE[:5]) if fails else set())
    if not fails:
        for saved, loaded in zip(one.blocks(HERE[:5]), other.blocks(THERE[:5]), strict=True):
            assert torch.equal(saved, loaded)


def test_lmcache_4642_a_daemon_restarted_faster_than_a_heartbeat_is_noticed(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE)
    for _ in range(3):
        daemon.kill()
        daemon.start()
        wait_for(lambda: all(c.session() is not None for c in engine.clients), "the clients are back")
        assert serve(engine, TOKENS, HERE) == (FIVE, set())


def test_without_a_daemon_everything_is_a_miss(daemon: Daemon) -> None:
    daemon.kill()
    engine = Engine(daemon)
    assert serve(engine, TOKENS, HERE) == (0, set())
    daemon.start()
    wait_for(lambda: all(client.session() for client in engine.clients), "engines find a daemon started later")
    serve(engine, TOKENS, HERE)
    assert engine.scheduler.matched_tokens(request(TOKENS), 0) == FIVE


def test_a_request_that_ran_without_a_daemon_is_saved_when_it_is_back(daemon: Daemon) -> None:
    engine = Engine(daemon)
    daemon.kill()
    wait_for(lambda: engine.clients[0].session() is None, "the daemon is missed")
    asked = request(TOKENS)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, (HERE,), 0)
    engine.step(engine.scheduler.orders(new_step([(asked, HERE, 0, len(TOKENS))])))
    daemon.start()
    wait_for(lambda: all(client.session() for client in engine.clients), "the clients are back")
    engine.step(engine.scheduler.orders(running_step([(asked, None, len(TOKENS) - 1, 1)])))
    engine.settle()
    assert metrics(daemon)["records_present"] == 5


def test_vllm_49829_a_frozen_daemon_stops_no_step(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on the way of a step asks the daemon, so a daemon that does not answer holds up none."""
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ClientConnection, "call", only_in_the_background(ClientConnection.call))
            for number in range(1, 40):
                prompt = [number * 10_000 + i for i in range(2 * BLOCK_TOKENS)]
                asked = request(prompt)
                engine.scheduler.matched_tokens(asked, 0)
                engine.scheduler.allocated(asked, ([1, 2, 3],), 0)
                engine.step(engine.scheduler.orders(new_step([(asked, [1, 2, 3], 0, len(prompt))])))
                engine.scheduler.finished(asked)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    wait_for(lambda: all(client.session() for client in engine.clients), "the clients are back")
    engine.settle()
    wait_for(lambda: metrics(daemon)["reservations"] == 0, "no reservation is left")
    assert serve(engine, TOKENS, HERE) == (FIVE, set())


def only_in_the_background(call: Any) -> Any:
    def checked(*arguments: Any, **named: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "a step asked the daemon"
        return call(*arguments, **named)

    return checked


def test_weights_changed_at_run_time_begin_a_new_namespace(daemon: Daemon) -> None:
    one, other = Engine(daemon, seed=1), Engine(daemon, seed=2)
    serve(one, TOKENS, HERE)
    running = request(list(range(7000, 7000 + 4 * BLOCK_TOKENS)))
    one.scheduler.matched_tokens(running, 0)
    one.scheduler.begin_epoch()
    one.step(one.scheduler.orders(new_step([(running, [30, 31, 32, 33], 0, 4 * BLOCK_TOKENS)])))
    wait_for(lambda: all(one.scheduler._plan.groups[0].spec in c.session().class_ids for c in one.clients), "new specs")
    assert one.scheduler.matched_tokens(request(TOKENS), 0) == 0
    assert serve(one, TOKENS, HERE) == (0, set())
    assert serve(one, TOKENS, HERE) == (FIVE, set())
    assert other.scheduler.matched_tokens(request(TOKENS), 0) == FIVE, "nobody else's blocks are gone"
    assert other.scheduler.matched_tokens(request(list(running.all_token_ids)), 0) == 0
    one.scheduler.finished(running)


def test_blocks_of_another_connector_that_may_be_inexact_are_not_saved(daemon: Daemon) -> None:
    exact, engine = Engine(daemon), Engine(daemon, inexact=True)
    asked = request(TOKENS)
    engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, (HERE,), 0)
    # Three blocks came from elsewhere.
    orders = engine.scheduler.orders(new_step([(asked, HERE, 3 * BLOCK_TOKENS, len(TOKENS) - 3 * BLOCK_TOKENS)]))
    assert orders.saves == []
    own = request(TOKENS)
    engine.scheduler.matched_tokens(own, 0)
    engine.scheduler.allocated(own, (THERE,), 0)
    assert engine.scheduler.orders(new_step([(own, THERE, 0, len(TOKENS))])).saves
    known = request(TOKENS)
    exact.scheduler.matched_tokens(known, 0)
    exact.scheduler.allocated(known, (HERE,), 0)
    assert exact.scheduler.orders(new_step([(known, HERE, 3 * BLOCK_TOKENS, 7)])).saves


def test_what_the_engines_own_cache_served_is_kept_by_kvd(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE)
    asked = request(TOKENS)
    engine.scheduler.matched_tokens(asked, FIVE)
    engine.scheduler.allocated(asked, (HERE,), 0)
    wait_for(lambda: metrics(daemon)["touched_total"] >= 5, "kvd learns of the use")


def test_closing_ends_threads_and_leaves_nothing(daemon: Daemon) -> None:
    engine = Engine(daemon, 2)
    serve(engine, TOKENS, HERE)
    asked = request(TOKENS)
    engine.scheduler.allocated(asked, (THERE,), engine.scheduler.matched_tokens(asked, 0))
    engine.step(engine.scheduler.orders(new_step([])))
    engine.close()
    threads = [part._thread for worker in engine.workers for part in (worker._loads, worker._saves)]
    assert not any(thread.is_alive() for thread in threads)
    wait_for(lambda: metrics(daemon)["clients"] <= 1, "the clients left")
    facts = metrics(daemon)
    assert (facts["reservations"], facts["quarantined_bytes"]) == (0, 0)


def test_a_forked_child_leaves_its_parents_pins_alone(daemon: Daemon) -> None:
    engine = Engine(daemon)
    serve(engine, TOKENS, HERE)
    asked = request(TOKENS)
    engine.scheduler.allocated(asked, (THERE,), engine.scheduler.matched_tokens(asked, 0))
    child = os.fork()
    if child == 0:
        engine.scheduler.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert engine.pins() == 5
    assert wait_for_load(engine, asked) == set()


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
            engine.scheduler.finished(asked)
            continue
        engine.scheduler.allocated(asked, (blocks,), found)
        if found:
            if fate < 0.2:  # aborted while it loads
                engine.scheduler.finished(asked)
            if failed := wait_for_load(engine, asked):  # evicted between look-up and pin
                found = min(blocks.index(block_id) for block_id in failed) * BLOCK_TOKENS
        orders = engine.scheduler.orders(new_step([(asked, blocks, found, len(tokens) - found)]))
        engine.step(orders)
        engine.scheduler.finished(asked)
    engine.settle()
    assert engine.pins() == 0
    assert engine.scheduler._states == {}
    facts = metrics(daemon)
    assert (facts["reservations"], facts["quarantined_bytes"]) == (0, 0)
    assert facts["evicted_total"] > 0, "the arena was too large to show anything"
