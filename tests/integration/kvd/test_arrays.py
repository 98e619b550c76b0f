"""Single objects from and to any memory, and look-ups that are remembered, with the real daemon."""

from __future__ import annotations

import array
import os
from collections.abc import Iterator

import pytest

from kvd.client import lookups
from kvd.client.arrays import get_array, get_buffer, put_array, put_buffer
from kvd.client.lookups import RepeatedLookups
from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import SPEC, KvdUser, key_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.integration
SIZE = SPEC.shard_bytes[0]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    yield from running()


@pytest.fixture
def user(daemon: DaemonProcess) -> Iterator[KvdUser]:
    made = KvdUser(daemon.socket)
    yield made
    made.client.close()
    daemon.drop(SPEC.namespace)


def put(user: KvdUser, key: bytes, content: object) -> None:
    """Save, and wait until it is in the index."""
    assert put_buffer(user.client, SPEC, key, content)
    wait_until(lambda: user.client.probe_run(SPEC, key) == 1, "the record is present")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer(user: KvdUser, kind: type) -> None:
    content = os.urandom(SIZE)
    put(user, key_of(1), kind(content))
    out = bytearray(SIZE)
    assert get_buffer(user.client, SPEC, key_of(1), out)
    assert out == content


def test_typed_buffers(user: KvdUser) -> None:
    content = array.array("d", [0.5] * (SIZE // 8))
    put(user, key_of(2), content)
    out = array.array("d", bytes(SIZE))
    assert get_buffer(user.client, SPEC, key_of(2), out)
    assert out == content


def test_what_does_not_fit_is_refused(user: KvdUser) -> None:
    with pytest.raises(ValueError, match=f"has {SIZE}"):
        put_buffer(user.client, SPEC, key_of(1), bytes(SIZE - 1))
    with pytest.raises(ValueError, match="do not lie together"):
        put_buffer(user.client, SPEC, key_of(1), memoryview(bytes(2 * SIZE))[::2])
    put(user, key_of(1), bytes(SIZE))
    with pytest.raises((BufferError, TypeError, ValueError)):
        get_buffer(user.client, SPEC, key_of(1), bytes(SIZE))


def test_wrong_bytes_are_reported_and_dropped(user: KvdUser) -> None:
    put(user, key_of(3), bytes(SIZE))
    session = user.client.session()
    assert session is not None
    run = user.client.pin_run(SPEC, key_of(3))
    assert run is not None
    place = run.arena.locate(run.slots[0], 0)
    assert place is not None
    run.release()
    run.arena._data[place.offset_bytes] = 1
    assert not get_buffer(user.client, SPEC, key_of(3), bytearray(SIZE))
    wait_until(lambda: user.client.probe_run(SPEC, key_of(3)) == 0, "the damaged record is dropped")


def test_numpy_arrays(user: KvdUser) -> None:
    numpy = pytest.importorskip("numpy")
    content = numpy.arange(SIZE // 4, dtype="float32").reshape(4, -1)
    assert put_array(user.client, SPEC, key_of(4), content)
    wait_until(lambda: user.client.probe_run(SPEC, key_of(4)) == 1, "the record is present")
    got = get_array(user.client, SPEC, key_of(4), "float32", content.shape)
    assert numpy.array_equal(got, content)
    assert get_array(user.client, SPEC, key_of(5), "float32", content.shape) is None
    with pytest.raises(ValueError, match="ascontiguousarray"):
        put_array(user.client, SPEC, key_of(4), content.T)


# ---- look-ups asked again ----


def test_an_answer_is_remembered_until_something_changes(user: KvdUser) -> None:
    asked = RepeatedLookups(user.client)
    keys = key_of(10) + key_of(11) + key_of(12)
    assert asked.probe_run("a", SPEC, keys) == 0
    put(user, key_of(10), bytes(SIZE))
    assert asked.probe_run("a", SPEC, keys) == 1
    put(user, key_of(11), bytes(SIZE))
    assert asked.probe_run("a", SPEC, keys) == 2
    # The remembered answer, whatever the keys: nothing was looked up.
    assert asked.probe_run("a", SPEC, b"") == 2
    asked.forget("a")
    assert asked.probe_run("a", SPEC, b"") == 0


def test_a_removal_is_noticed(daemon: DaemonProcess, user: KvdUser) -> None:
    asked = RepeatedLookups(user.client)
    put(user, key_of(20), bytes(SIZE))
    assert asked.probe_run(1, SPEC, key_of(20)) == 1
    daemon.drop(SPEC.namespace)
    assert asked.probe_run(1, SPEC, key_of(20)) == 0


def test_questions_are_bounded(user: KvdUser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "REMEMBERED_MAX", 4)
    asked = RepeatedLookups(user.client)
    for number in range(20):
        assert asked.probe_run(number, SPEC, key_of(number)) == 0
        assert len(asked._answers) <= 4


def test_a_forked_child_finds_nothing(user: KvdUser) -> None:
    put(user, key_of(30), bytes(SIZE))
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
        put(user, key_of(1), bytes(SIZE))
        asked = RepeatedLookups(user.client)
        assert asked.probe_run(1, SPEC, key_of(1)) == 1
        daemon.kill()
        wait_until(lambda: user.client.session() is None, "the client noticed")
        assert asked.probe_run(1, SPEC, key_of(1)) == 0
        user.client.close()
    finally:
        daemon.clean_up()
