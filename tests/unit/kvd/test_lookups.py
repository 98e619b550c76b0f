"""Remembered look-ups over a real store in this process: removals, gaps, and random changes."""

from __future__ import annotations

import array
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from infera_core import lib

from kvd.client import lookups
from kvd.client.arena import Arena
from kvd.client.client import KvdClient, RecordSpec, Session
from kvd.client.lookups import RepeatedLookups
from kvd.store import Store, index_bytes, ledger_bytes

RECORDS, DATA_BYTES = 2048, 16 << 20
SPEC = RecordSpec(b"namespace-number", 0, (4096,), "model")


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys_of(*numbers: int) -> bytes:
    return b"".join(map(key_of, numbers))


class Rig:
    """A store and a client's view of it; what asks sees only the view."""

    def __init__(self, folder: Path) -> None:
        sizes = [index_bytes(RECORDS, 1, DATA_BYTES), DATA_BYTES, ledger_bytes(RECORDS)]
        files = []
        for name, size in zip(("index", "data", "ledger"), sizes, strict=True):
            files.append(os.open(folder / name, os.O_RDWR | os.O_CREAT))
            os.ftruncate(files[-1], size)
        self._index, ledger = mmap.mmap(files[0], 0), mmap.mmap(files[2], 0)
        self.store = Store(
            self._index, instance=bytes(16), generation=1, records=RECORDS, shards_max=1, data_bytes=DATA_BYTES,
            seed=(1, 2),
        )  # fmt: skip
        self._client = self.store.attach(ledger, 7)
        self.class_id = self.store.open_class(SPEC.namespace, 0, SPEC.shard_bytes, SPEC.model)
        self.arena = Arena("instance", *files)
        self.session: Session | None = Session(self.arena, {SPEC: self.class_id})
        holder = SimpleNamespace(_session=self.session, session=lambda: self.session)
        self.asked = RepeatedLookups(cast(KvdClient, holder))

    def put(self, *numbers: int) -> None:
        wishes = b"".join(key_of(number) + bytes([1, 0, 0, 0]) + bytes(4) for number in numbers)
        answer = self.store.reserve(self._client, self.class_id, 0, lib.STORE_RETAIN_SHORT, 0, wishes, 1, 2)
        reservations = array.array("Q", answer)[0::3]
        self.store.commit(self._client, b"".join(name.to_bytes(8, "little") + bytes(8) for name in reservations))

    def drop(self, *numbers: int) -> None:
        for number in numbers:
            assert lib.store_drop(self.store.handle, self.class_id, key_of(number)) == lib.STORE_OK

    def ask(self, name: object, keys: bytes) -> int:
        return self.asked.probe_run(name, SPEC, keys)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.store.close()


def test_a_run_grows(rig: Rig) -> None:
    keys = keys_of(*range(40))
    assert rig.ask("a", keys) == 0
    rig.put(1, 2, 3, 0)
    assert rig.ask("a", keys) == 4
    rig.put(*range(4, 40))
    assert rig.ask("a", keys) == 40


@pytest.mark.parametrize("gone", [1, 3, 29, 30])
def test_a_run_that_lost_its_end_is_shortened(rig: Rig, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "WHOLE_KEYS_MAX", 0)
    rig.put(*range(30))
    assert rig.ask("a", keys_of(*range(30))) == 30
    rig.drop(*range(30 - gone, 30))
    assert rig.ask("a", keys_of(*range(30))) == 30 - gone


def test_a_gap_in_the_middle_is_found_by_going_round(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "WHOLE_KEYS_MAX", 8)
    runs = [keys_of(*range(10 * run, 10 * run + 10)) for run in range(4)]
    rig.put(*range(40))
    assert [rig.ask(run, keys) for run, keys in enumerate(runs)] == [10] * 4
    rig.drop(35)
    answers = []
    for number in (9, 8, 7, 6):  # one run is looked at whole with each
        rig.drop(number)
        answers.append(rig.ask(3, runs[3]))
    assert answers[-1] == 5
    assert rig.ask(0, runs[0]) == 6


def test_forgetting_moves_another_question_and_keeps_its_answer(rig: Rig) -> None:
    rig.put(*range(10))
    for name in range(5):
        assert rig.ask(name, keys_of(*range(name, 10))) == 10 - name
    rig.asked.forget(1)
    rig.asked.forget(4)
    rig.asked.forget(4)
    rig.put(10)
    assert [rig.ask(name, b"") for name in (0, 2, 3)] == [10, 8, 7]
    assert rig.ask(1, keys_of(10)) == 1


def test_at_the_limit_all_are_forgotten_and_asked_anew(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "REMEMBERED_MAX", 4)
    rig.put(*range(20))
    for number in range(20):
        assert rig.ask(number, key_of(number)) == 1
        assert len(rig.asked._answers) == len(rig.asked._names) <= 4
    rig.drop(19)
    assert rig.ask(19, key_of(19)) == 0


def test_without_a_daemon_everything_is_a_miss(rig: Rig) -> None:
    rig.put(1)
    assert rig.ask("a", key_of(1)) == 1
    rig.session = None
    rig.asked._client._session = None
    assert rig.ask("a", key_of(1)) == 0


def test_random_changes_against_plain_look_ups(rig: Rig) -> None:
    """All runs together fit what is looked at whole, so every answer is exact, whatever happened in between."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    runs: dict[int, bytes] = {}
    present: set[int] = set()
    for _ in range(20_000):
        number = dice.randrange(60)
        if number in present and dice.random() < 0.5:
            rig.drop(number)
            present.discard(number)
        elif number not in present:
            rig.put(number)
            present.add(number)
        name = dice.randrange(24)
        if dice.random() < 0.1:
            rig.asked.forget(name)
            runs.pop(name, None)
        start = dice.randrange(50)
        keys = runs.setdefault(name, keys_of(*range(start, start + dice.randrange(1, 12))))
        assert rig.ask(name, keys) == rig.arena.probe_run(rig.class_id, 1, keys)
    assert set(rig.asked._places) == set(rig.asked._answers) == set(runs)
