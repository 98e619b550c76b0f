"""Two real engines, kvd and the router: blocks are shared, answers do not change, and the right worker is picked."""

from __future__ import annotations

import json

import pytest

from tests.support.engine_fixtures import BLOCK_TOKENS, EngineFleet, prompt_of
from tests.support.processes import call, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_same_prefix_goes_to_the_engine_that_holds_it(engine_fleet: EngineFleet) -> None:
    first = engine_fleet.ask(prompt_of(1, 400))
    assert first.cached_tokens == 0
    wait_until(lambda: _hbm_blocks(engine_fleet, first.worker) > 0, "the router learned of the engine's blocks")
    again = [engine_fleet.ask(prompt_of(1, 400)) for _ in range(3)]
    assert {answer.worker for answer in again} == {first.worker}
    assert {answer.text for answer in again} == {first.text}
    assert {answer.cached_tokens for answer in again} == {first.cacheable_tokens}


@pytest.mark.parametrize("words", [23, 24, 25, 60, 400])
def test_other_engine_is_served_from_kvd(engine_fleet: EngineFleet, words: int) -> None:
    one, other = engine_fleet.worker_ids
    prompt = prompt_of(words, words)
    cold = engine_fleet.ask_and_save(prompt, one)
    shared = engine_fleet.ask(prompt, other)
    assert shared.worker == other
    assert shared.text == cold.text
    assert (cold.cached_tokens, shared.cached_tokens) == (0, cold.cacheable_tokens)


def test_generated_blocks_are_kept_for_the_next_turn(engine_fleet: EngineFleet) -> None:
    one, other = engine_fleet.worker_ids
    prompt = prompt_of(2, 100)
    answer = engine_fleet.ask_and_save(prompt, one, max_tokens=100, ignore_eos=True, return_token_ids=True)
    choice = answer.reply.json["choices"][0]
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    known_blocks = (len(tokens) - 1) // BLOCK_TOKENS
    body = {"model": "tiny", "prompt": tokens + [5] * 40, "max_tokens": 4, "temperature": 0}
    reply = call(f"{engine_fleet.url}/v1/completions", body, headers={"X-Infera-Worker": other})
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == known_blocks * BLOCK_TOKENS


def test_salt_separates_tenants(engine_fleet: EngineFleet) -> None:
    one, other = engine_fleet.worker_ids
    prompt = prompt_of(3, 200)
    mine = engine_fleet.ask_and_save(prompt, one, cache_salt="tenant-a")
    theirs = engine_fleet.ask(prompt, other, cache_salt="tenant-b")
    unsalted = engine_fleet.ask(prompt, other)
    back = engine_fleet.ask(prompt, other, cache_salt="tenant-a")
    assert (theirs.cached_tokens, unsalted.cached_tokens) == (0, 0)
    assert back.cached_tokens == mine.cacheable_tokens
    assert {mine.text, theirs.text, unsalted.text, back.text} == {mine.text}


def test_streamed_answer_equals_the_plain_one(engine_fleet: EngineFleet) -> None:
    prompt = prompt_of(4, 150)
    plain = engine_fleet.ask(prompt)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    reply = call(f"{engine_fleet.url}/v1/completions", body)
    frames = [frame for frame in reply.events if frame != "[DONE]"]
    assert "".join(choice["text"] for frame in frames for choice in frame["choices"]) == plain.text
    assert all(frame.get("usage") is None for frame in frames), "usage was not asked for"


def test_router_predicts_the_engine_s_tokens(engine_fleet: EngineFleet) -> None:
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}, {"type": "text", "text": "why?"}]},
    ]
    before = _prompt_tokens(engine_fleet)
    body = {"model": "tiny", "messages": messages, "max_tokens": 2}
    reply = call(f"{engine_fleet.url}/v1/chat/completions", body)
    predicted, reported = (now - then for now, then in zip(_prompt_tokens(engine_fleet), before, strict=True))
    assert predicted == reported == reply.json["usage"]["prompt_tokens"]


def test_engine_refuses_in_its_own_words(engine_fleet: EngineFleet) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "temperature": -3}
    reply = call(f"{engine_fleet.url}/v1/completions", body)
    assert reply.status == 400
    assert "temperature" in reply.json["error"]["message"]


def test_flipped_bytes_in_the_arena_are_recomputed(engine_fleet: EngineFleet) -> None:
    one, other = engine_fleet.worker_ids
    prompt = prompt_of(5, 300)
    cold = engine_fleet.ask_and_save(prompt, one)
    _flip_every_page(engine_fleet)
    served = engine_fleet.ask(prompt, other)
    assert served.text == cold.text
    log = engine_fleet.engine_log(engine_fleet.worker_ids.index(other))
    assert "cached blocks could not be used" in log
    # vllm#49176: what was found damaged is dropped, so that nobody runs into it again.
    wait_until(lambda: engine_fleet.kvd_metric("damaged_total") > 0, "the damaged records were dropped")


def test_nothing_leaks(engine_fleet: EngineFleet) -> None:
    for seed in range(20, 26):
        engine_fleet.ask(prompt_of(seed, 200))
    for name in ("reservations", "quarantined_bytes", "records_incomplete"):
        wait_until(lambda name=name: engine_fleet.kvd_metric(name) == 0, f"{name} went down to nothing")  # type: ignore[misc]


def test_engines_report_what_they_computed(engine_fleet: EngineFleet) -> None:
    """The names of the metrics that the agent reads are those of the real engine."""
    answer = engine_fleet.ask(prompt_of(5, 300))
    computed = answer.reply.json["usage"]["prompt_tokens"] - answer.cached_tokens

    def reported() -> bool:
        (entry,) = (
            entry
            for entry in call(f"{engine_fleet.url}/v1/workers").json["data"]
            if entry["worker_id"] == answer.worker
        )
        return any((load.get("computed_tokens") or 0) >= computed for load in entry["reported"])

    wait_until(reported, "the engine's counter of computed tokens arrived")


def _hbm_blocks(fleet: EngineFleet, worker: str) -> int:
    workers = call(f"{fleet.url}/v1/workers").json["data"]
    (entry,) = [entry for entry in workers if entry["worker_id"] == worker]
    return int(json.loads(json.dumps(entry["cached_blocks"])).get("hbm", 0))


def _prompt_tokens(fleet: EngineFleet) -> tuple[int, int]:
    """The server's totals: as predicted, as engines reported."""
    lines = call(f"{fleet.url}/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("infera_prompt_tokens_total{")]
    predicted = next(line for line in found if 'source="predicted"' in line)
    reported = next(line for line in found if 'source="reported"' in line)
    return int(float(predicted.split()[-1])), int(float(reported.split()[-1]))


def _flip_every_page(fleet: EngineFleet) -> None:
    (data,) = fleet.fleet.settings.arena_folder.glob("*.data")
    with data.open("r+b", buffering=0) as file:
        size = data.stat().st_size
        for offset in range(100, size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x10]))
