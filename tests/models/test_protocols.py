"""Pins, doorbell, ring, stock and quarantine: right in every interleaving, and wrong without what makes them right."""

from __future__ import annotations

import pytest

from tests.models.checker import Fence, Go, Load, Set, Step, Store, Swap, Wait, explore

Facts = dict[str, int]
NOTHING = Set("nothing", 0)

# ---- the checker itself ----


def test_the_checker_finds_store_buffering() -> None:
    """The textbook case: both threads may miss the other's store, unless both fence."""

    def programs(middle: Step) -> list[list[Step]]:
        return [
            [Store("x", 1), middle, Load("y", "r"), Set("First", lambda r: r["r"])],
            [Store("y", 1), middle, Load("x", "r"), Set("Second", lambda r: r["r"])],
        ]

    def both_missed(_: Facts, facts: Facts) -> bool:
        return facts.get("First") == 0 and facts.get("Second") == 0

    assert explore({"x": 0, "y": 0}, programs(NOTHING), both_missed)
    assert explore({"x": 0, "y": 0}, programs(Fence()), both_missed) is None


# ---- pin and evict (csrc/arena.c, csrc/store_index.c) ----


def pin_and_evict(client_fence: Step, daemon_fence: Step) -> list[str] | None:
    """A client pins a record, reads its bytes and unpins; the daemon evicts it and lets others write there."""
    client: list[Step] = [
        Store("pin", 1),
        client_fence,
        Load("version", "seen"),
        Go(lambda r: r["seen"] != 0, 7),  # changing or changed: a miss
        Set("Reading", 1),
        Load("data", "bytes"),
        Set("Reading", 0),
        Store("pin", 0, release=True),
    ]
    daemon: list[Step] = [
        Store("version", 1),
        daemon_fence,
        Load("pin", "pinned"),
        Go(lambda r: r["pinned"] != 0, 6),
        Set("Reused", 1),
        Go(lambda r: True, 7),
        Store("version", 2, release=True),  # called off
        NOTHING,
    ]
    return explore(
        {"pin": 0, "version": 0, "data": 0},
        [client, daemon],
        lambda _, facts: bool(facts.get("Reading") and facts.get("Reused")),
    )


def test_a_pinned_record_is_never_reused() -> None:
    assert pin_and_evict(Fence(), Fence()) is None


@pytest.mark.parametrize("fences", [(NOTHING, Fence()), (Fence(), NOTHING), (NOTHING, NOTHING)])
def test_pins_need_both_fences(fences: tuple[Step, Step]) -> None:
    assert pin_and_evict(*fences)


# ---- the doorbell (csrc/ring.c, csrc/loop.c) ----


def doorbell(client_fence: Step, daemon_fence: Step) -> list[str] | None:
    """A client leaves an entry and rings if the daemon sleeps; the daemon looks once more before it sleeps."""
    client: list[Step] = [
        Store("head", 1, release=True),
        client_fence,
        Load("sleeping", "asleep"),
        Go(lambda r: r["asleep"] == 0, 5),
        Store("bell", 1),
    ]
    daemon: list[Step] = [
        Store("sleeping", 1),
        daemon_fence,
        Load("head", "head"),
        Go(lambda r: r["head"] == 1, 6),
        Wait("bell", 1),
        Load("head", "head"),
        Set("Served", lambda r: r["head"]),
    ]
    return explore(
        {"head": 0, "sleeping": 0, "bell": 0},
        [client, daemon],
        lambda _, facts: False,
        lambda _, facts: facts.get("Served") != 1,
    )


def test_no_entry_is_slept_over() -> None:
    assert doorbell(Fence(), Fence()) is None


@pytest.mark.parametrize("fences", [(NOTHING, Fence()), (Fence(), NOTHING)])
def test_the_doorbell_needs_both_fences(fences: tuple[Step, Step]) -> None:
    assert doorbell(*fences)


# ---- the ring (csrc/ring.c) ----


def ring(head_is_release: bool, tail_is_release: bool) -> list[str] | None:
    """Two entries through a ring of one: the second may be written only when the first has been read."""
    client: list[Step] = [
        Store("entry", 1),
        Store("head", 1, release=head_is_release),
        Load("tail", "tail"),
        Go(lambda r: r["tail"] == 0, 8),  # full: falls back to the socket
        Store("entry", 2),
        Store("head", 2, release=head_is_release),
        NOTHING,
        NOTHING,
    ]
    daemon: list[Step] = [
        Load("head", "head"),
        Go(lambda r: r["head"] == 0, 10),
        Load("entry", "got"),
        Set("First", lambda r: r["got"]),
        Store("tail", 1, release=tail_is_release),
        Load("head", "head"),
        Go(lambda r: r["head"] < 2, 10),
        Load("entry", "got"),
        Set("Second", lambda r: r["got"]),
        NOTHING,
    ]
    return explore(
        {"entry": 0, "head": 0, "tail": 0},
        [client, daemon],
        lambda _, facts: facts.get("First", 1) != 1 or facts.get("Second", 2) != 2,
    )


def test_entries_arrive_whole_and_in_order() -> None:
    assert ring(head_is_release=True, tail_is_release=True) is None


def test_the_head_must_be_released() -> None:
    assert ring(head_is_release=False, tail_is_release=True)


# ---- stock (csrc/ring.c) ----

EMPTY, READY, TAKEN, FILLING = 0, 1, 2, 10


def stock(counts_fillings: bool) -> list[str] | None:
    """A client takes an extent while the daemon revokes it and fills the entry anew with another one."""
    next_ready = READY + (FILLING if counts_fillings else 0)
    client: list[Step] = [
        Load("state", "word"),
        Go(lambda r: r["word"] % FILLING != READY, 6),
        Load("reservation", "mine"),
        Swap("state", lambda r: r["word"], lambda r: r["word"] - READY + TAKEN, "won"),
        Go(lambda r: not r["won"], 6),
        Set("Writing", lambda r: r["mine"]),
    ]
    daemon: list[Step] = [
        Swap("state", READY, EMPTY, "revoked"),
        Go(lambda r: not r["revoked"], 5),
        Set("Elsewhere", 1),  # reservation 1 is given to somebody else
        Store("reservation", 2),
        Store("state", next_ready, release=True),
    ]
    return explore(
        {"state": READY, "reservation": 1},
        [client, daemon],
        lambda _, facts: facts.get("Writing") == 1 and facts.get("Elsewhere") == 1,
    )


def test_an_extent_is_taken_or_revoked_never_both() -> None:
    assert stock(counts_fillings=True) is None


def test_stock_needs_its_count_of_fillings() -> None:
    assert stock(counts_fillings=False)


# ---- reservations and quarantine (csrc/store_reserve.c) ----


def expiry(quarantines: bool) -> list[str] | None:
    """A writer that may sleep past its deadline commits, then ends; the daemon lets its space go to another.

    `done` is the writer's commit, `dead` its pidfd. The deadline may pass at any time.
    """
    writer: list[Step] = [
        Set("Writing", 1),
        Set("Writing", 0),
        Store("done", 1, release=True),
        Store("dead", 1, release=True),
    ]
    after_deadline: list[Step] = [Load("done", "done"), Go(lambda r: r["done"] == 1, 2 if quarantines else 3)]
    if quarantines:
        after_deadline += [Wait("dead", 1)]  # until it has said so or is gone
    daemon: list[Step] = [*after_deadline, Set("Reused", 1)]
    return explore(
        {"done": 0, "dead": 0},
        [writer, daemon],
        lambda _, facts: bool(facts.get("Writing") and facts.get("Reused")),
    )


def test_space_is_not_reused_under_a_slow_writer() -> None:
    assert expiry(quarantines=True) is None


def test_without_quarantine_it_would_be() -> None:
    assert expiry(quarantines=False)


def death(drains_first: bool) -> list[str] | None:
    """A client leaves a commit in its ring and dies. Handled in the wrong order, the commit is lost."""
    client: list[Step] = [Store("head", 1, release=True), Store("dead", 1, release=True)]
    drain: list[Step] = [Load("head", "head"), Set("Saved", lambda r: r["head"])]
    release: list[Step] = [Set("Released", 1)]
    early: list[Step] = [Load("dead", "dead"), Load("head", "unused")]
    daemon: list[Step] = [Wait("dead", 1), *drain, *release] if drains_first else [*drain, *early, *release]
    return explore(
        {"head": 0, "dead": 0},
        [client, daemon],
        lambda memory, facts: bool(facts.get("Released") and memory["dead"] and not facts.get("Saved")),
    )


def test_a_dead_clients_ring_is_drained_before_its_space_is_released() -> None:
    assert death(drains_first=True) is None
    assert death(drains_first=False)


# ---- stock that stays out for long, and what a client that comes back still writes to (csrc/store_reserve.c) ----


def overdue(stays_its_own: bool) -> list[str] | None:
    """A client takes an extent and is slow; the daemon sees twice that it is out and counts it as quarantined."""
    client: list[Step] = [
        Swap("state", READY, EMPTY, "won"),
        Go(lambda r: not r["won"], 5),
        Set("Writing", 1),
        Set("Writing", 0),
        Store("head", 1, release=True),
    ]
    give_away: list[Step] = [Wait("head", 1)] if stays_its_own else []
    daemon: list[Step] = [
        Load("state", "first"),
        Load("state", "second"),
        Go(lambda r: r["first"] == READY or r["second"] == READY, 4 + len(give_away)),
        *give_away,
        Set("Reused", 1),
    ]
    return explore(
        {"state": READY, "head": 0},
        [client, daemon],
        lambda _, facts: bool(facts.get("Writing") and facts.get("Reused")),
    )


def test_overdue_stock_is_not_reused_under_a_slow_client() -> None:
    assert overdue(stays_its_own=True) is None
    assert overdue(stays_its_own=False)


def coming_back(says_so_first: bool) -> list[str] | None:
    """A client with a copy under way comes back on a new connection; the daemon frees what it does not speak of.

    The list is made after the last grant was noted and before HELLO is sent, so it has every extent written to.
    """
    note: list[Step] = [Store("listed", 1)]
    copying: list[Step] = [Set("Writing", 1)]
    hello: list[Step] = [Store("hello", 1, release=True)]
    client = [*note, *copying, *hello] if says_so_first else [*copying, *hello, *note]
    daemon: list[Step] = [
        Wait("hello", 1),
        Load("listed", "listed"),
        Go(lambda r: r["listed"] == 1, 4),
        Set("Reused", 1),
    ]
    return explore(
        {"listed": 0, "hello": 0},
        [[*client, Set("Writing", 0)], daemon],
        lambda _, facts: bool(facts.get("Writing") and facts.get("Reused")),
    )


def test_what_a_client_still_writes_to_is_noted_before_it_comes_back() -> None:
    assert coming_back(says_so_first=True) is None
    assert coming_back(says_so_first=False)
