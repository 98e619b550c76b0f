from __future__ import annotations

import random

from infera.router.text_index import (
    BYTES_PER_TOKEN,
    CHUNK_BYTES,
    CHUNKS_PER_TEXT_MAX,
    ENTRY_LIFE_S,
    PLACES_MAX,
    TextIndex,
    text_prompt,
)

A, B = ("a", 0), ("b", 0)
CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN


def chat(*texts: str, **more: object) -> dict[str, object]:
    messages = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)
    ]
    return {"messages": messages, **more}


def long(seed: int, size: int = 2_000) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def test_the_next_round_of_a_chat_is_found_where_the_last_one_was() -> None:
    index = TextIndex()
    first = text_prompt("m", chat(long(1)))
    index.sent(first, A, 0.0)
    index.sent(text_prompt("m", chat(long(2))), B, 0.0)
    second = text_prompt("m", chat(long(1), long(3), long(4)))
    assert index.match(second, [A, B], 1.0) == {A: len(first.chunks) * CHUNK_TOKENS}


def test_a_shared_beginning_is_found_everywhere_it_was_sent() -> None:
    index = TextIndex()
    for place, own in ((A, 5), (B, 6)):
        index.sent(text_prompt("m", chat(long(1), long(own))), place, 0.0)
    found = index.match(text_prompt("m", chat(long(1), long(7))), [A, B], 1.0)
    assert found[A] == found[B] >= (2_000 // CHUNK_BYTES) * CHUNK_TOKENS


def test_models_salts_and_tools_are_kept_apart() -> None:
    index = TextIndex()
    index.sent(text_prompt("m", chat(long(1))), A, 0.0)
    for other in (
        text_prompt("n", chat(long(1))),
        text_prompt("m", chat(long(1), cache_salt="x")),
        text_prompt("m", chat(long(1), tools=[{"name": "t"}])),
    ):
        assert index.match(other, [A], 0.0) == {}


def test_guesses_grow_old() -> None:
    index = TextIndex()
    prompt = text_prompt("m", {"prompt": long(1)})
    index.sent(prompt, A, 0.0)
    assert index.match(prompt, [A], ENTRY_LIFE_S - 1)
    assert not index.match(prompt, [A], ENTRY_LIFE_S)


def test_dynamo_10774_an_index_that_never_freed() -> None:
    """dynamo#10774: an index that never merged or freed: 20 GB an hour. Ours has a limit, and drops ends first."""
    index = TextIndex(chunks_max=100)
    shared = long(0, 4 * CHUNK_BYTES)
    for number in range(500):
        index.sent(text_prompt("m", {"prompt": shared + long(number, 3_000)}), A, float(number))
        assert len(index) <= 100
    found = index.match(text_prompt("m", {"prompt": shared + long(9_999)}), [A], 500.0)
    assert found == {A: 4 * CHUNK_TOKENS}, "what all share is used all the time, so it stays"


def test_places_and_text_are_bounded() -> None:
    index = TextIndex()
    prompt = text_prompt("m", {"prompt": "x" * (2 * CHUNKS_PER_TEXT_MAX * CHUNK_BYTES)})
    assert len(prompt.chunks) == CHUNKS_PER_TEXT_MAX
    assert prompt.token_count == 2 * CHUNKS_PER_TEXT_MAX * CHUNK_TOKENS
    places = [(str(number), 0) for number in range(PLACES_MAX + 10)]
    for now, place in enumerate(places):
        index.sent(prompt, place, float(now))
    assert set(index.match(prompt, places, 100.0)) == set(places[10:])


def test_odd_bodies_are_no_trouble() -> None:
    for body in ({}, {"messages": None}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"messages": "x", "tools": 5}):
        assert text_prompt("m", body).token_count >= 0
