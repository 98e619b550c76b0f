"""Look-ups that are remembered, with the real daemon."""

from __future__ import annotations

import os

import pytest

from kvd.client import lookups
from kvd.client.lookups import RepeatedLookups
from tests.support.kvd_daemon import DaemonProcess
from tests.support.kvd_user import SPEC, KvdUser, key_of, put_and_wait
from tests.support.processes import wait_until

pytestmark = pytest.mark.integration
SIZE = SPEC.shard_bytes[0]


def put_numbers(user: KvdUser, numbers: list[int]) -> None:
    for number in numbers:
        put_and_wait(user, key_of(number), bytes(SIZE))


def test_an_answer_is_remembered_until_something_changes(user: KvdUser) -> None:
    asked = RepeatedLookups(user.client)
    keys = key_of(10) + key_of(11) + key_of(12)
    assert asked.probe_run("a", SPEC, keys) == 0
    put_and_wait(user, key_of(10), bytes(SIZE))
    assert asked.probe_run("a", SPEC, keys) == 1
    put_and_wait(user, key_of(11), bytes(SIZE))
    assert asked.probe_run("a", SPEC, keys) == 2
    # The remembered answer, whatever the keys: nothing was looked up.
    assert asked.probe_run("a", SPEC, b"") == 2
    asked.forget("a")
    assert asked.probe_run("a", SPEC, b"") == 0


def test_a_removal_is_noticed(shared_daemon: DaemonProcess, user: KvdUser) -> None:
    asked = RepeatedLookups(user.client)
    put_and_wait(user, key_of(20), bytes(SIZE))
    assert asked.probe_run(1, SPEC, key_of(20)) == 1
    shared_daemon.drop(SPEC.namespace)
    assert asked.probe_run(1, SPEC, key_of(20)) == 0


def test_questions_are_bounded(user: KvdUser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "REMEMBERED_MAX", 4)
    asked = RepeatedLookups(user.client)
    for number in range(20):
        assert asked.probe_run(number, SPEC, key_of(number)) == 0
        assert len(asked._answers) <= 4


def test_a_forked_child_finds_nothing(user: KvdUser) -> None:
    put_and_wait(user, key_of(30), bytes(SIZE))
    asked = RepeatedLookups(user.client)
    assert asked.probe_run(1, SPEC, key_of(30)) == 1
    child = os.fork()
    if child == 0:
        os._exit(asked.probe_run(1, SPEC, key_of(30)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asked.probe_run(1, SPEC, key_of(30)) == 1


def test_after_a_restart_nothing_old_is_answered() -> None:
    daemon = DaemonProcess().start()
    try:
        user = KvdUser(daemon.socket)
        put_and_wait(user, key_of(1), bytes(SIZE))
        asked = RepeatedLookups(user.client)
        assert asked.probe_run(1, SPEC, key_of(1)) == 1
        daemon.kill()
        wait_until(lambda: user.client.session() is None, "the client noticed")
        assert asked.probe_run(1, SPEC, key_of(1)) == 0
        user.client.close()
    finally:
        daemon.clean_up()


def test_a_run_grows_while_nothing_is_removed(user: KvdUser) -> None:
    asked = RepeatedLookups(user.client)
    keys = b"".join(map(key_of, range(100, 140)))
    assert asked.probe_run("a", SPEC, keys) == 0
    put_numbers(user, [101, 102, 103, 100])
    assert asked.probe_run("a", SPEC, keys) == 4
    put_numbers(user, list(range(104, 140)))
    assert asked.probe_run("a", SPEC, keys) == 40
