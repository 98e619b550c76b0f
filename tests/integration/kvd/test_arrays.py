"""Single objects from and to any memory, with the real daemon."""

from __future__ import annotations

import array
import os

import pytest

from kvd.client.arrays import get_array, get_buffer, put_array, put_buffer
from tests.support.kvd_user import SPEC, KvdUser, key_of, put_and_wait
from tests.support.processes import wait_until

pytestmark = pytest.mark.integration
SIZE = SPEC.shard_bytes[0]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer(user: KvdUser, kind: type) -> None:
    content = os.urandom(SIZE)
    put_and_wait(user, key_of(1), kind(content))
    out = bytearray(SIZE)
    assert get_buffer(user.client, SPEC, key_of(1), out)
    assert out == content


def test_typed_buffers(user: KvdUser) -> None:
    content = array.array("d", [0.5] * (SIZE // 8))
    put_and_wait(user, key_of(2), content)
    out = array.array("d", bytes(SIZE))
    assert get_buffer(user.client, SPEC, key_of(2), out)
    assert out == content


def test_what_does_not_fit_is_refused(user: KvdUser) -> None:
    with pytest.raises(ValueError, match=f"has {SIZE}"):
        put_buffer(user.client, SPEC, key_of(1), bytes(SIZE - 1))
    with pytest.raises(ValueError, match="do not lie together"):
        put_buffer(user.client, SPEC, key_of(1), memoryview(bytes(2 * SIZE))[::2])
    put_and_wait(user, key_of(1), bytes(SIZE))
    with pytest.raises((BufferError, TypeError, ValueError)):
        get_buffer(user.client, SPEC, key_of(1), bytes(SIZE))


def test_wrong_bytes_are_reported_and_dropped(user: KvdUser) -> None:
    put_and_wait(user, key_of(3), bytes(SIZE))
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
