"""sglang#39822: picks for caches that no longer existed after restarts.

A restart is another incarnation: bindings, load, speed and guesses of the earlier life must not reach it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from infera.cachemap.interface import Match
from infera.discovery.record import RankLoad
from infera.router.affinity import SessionTable
from infera.router.place import Option, Place
from infera.router.text_index import TextIndex, text_prompt
from tests.support.placement import STREAM, core, option
from tests.support.records import record

OLD = Place(record(1))
NEW = Place(record(1, incarnation="f" * 32))
OTHER = Place(record(2))
SESSION = replace(STREAM, session=b"s")


def at(place: Place, prompt: int = 1_600) -> Option:
    return Option(place, (Match(),), (prompt,))


def test_a_session_bound_to_the_earlier_life_is_chosen_anew() -> None:
    picks: Counter[str] = Counter()
    for _ in range(40):
        router = core(sessions=SessionTable("both"))
        router._rng.seed(len(picks))
        _, ticket = router.pick([at(OLD)], SESSION, now=0.0)
        router.done(ticket, now=0.0)
        decision, _ = router.pick([at(NEW), at(OTHER)], SESSION, now=1.0)
        assert decision.reason != "session"
        picks[decision.worker_id] += 1
        decision, _ = router.pick([at(NEW), at(OTHER)], SESSION, now=1.0)
        assert decision.reason == "session"


def test_nothing_of_the_earlier_life_counts() -> None:
    router = core()
    for turn in range(5):
        router.speeds.learn(OLD, 0.01, turn)
        router.speeds.learn(OTHER, 0.001, turn)
    router.report([OLD], [RankLoad(waiting_requests=90)], now=5.0)
    _, ticket = router.pick([at(OLD, 50_000)], replace(STREAM, is_forced=True), now=5.0)
    router.forget([OLD])
    decision, _ = router.pick([at(NEW)], STREAM, now=5.0)
    row = decision.row
    assert (row.factor, row.other_prefill_tokens, row.queued_prefill_tokens, row.busy_share) == (1, 0, 0, 0)
    router.failed(ticket, now=6.0)
    assert router.loads.of(OLD.key).active_requests == 0


def test_llm_d_router_1736_a_worker_that_left_leaves_nothing_behind() -> None:
    """llm-d-router#1736: a pod left, its entries stayed."""
    router = core("round-robin")
    for number in range(1, 200):
        made = option(number)
        router.report([made.place], [RankLoad(waiting_requests=1, computed_tokens=5)], now=0.0)
        _, ticket = router.pick([made], STREAM, now=0.0)
        router.first_token(ticket, now=0.5)
        for _ in range(4):
            router.speeds.learn(made.place, 0.001, 1.0)
        router.done(ticket, now=1.0)
        router.forget([made.place])
    kept = (router.loads._loads, router.speeds._workers, router.reports._reports, router._meter._stretches,
            router._busy._work, router.policy._last_turn, router._sent)  # type: ignore[attr-defined]  # fmt: skip
    assert [len(books) for books in kept] == [0] * 7


def test_what_was_guessed_of_the_earlier_life_is_not_guessed_of_the_new_one() -> None:
    index = TextIndex()
    prompt = text_prompt("m", {"prompt": "once upon a time " * 100})
    index.sent(prompt, OLD.key, 0.0)
    assert index.match(prompt, [OLD.key], 1.0)
    assert not index.match(prompt, [NEW.key, OTHER.key], 1.0)
