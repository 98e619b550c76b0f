"""The disk store over real files: what is put is served, over restarts, and compared with a plain model."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.disk_store import DiskSettings, DiskState, DiskStatus, DiskStore, DiskStoreError, DiskWay
from tests.support.disk_user import SEGMENT_BYTES, DiskUser, key_of

LENGTH = 50_000


def test_what_is_put_is_served_and_after_a_restart_too(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a", shards=2) as user:
        user.wait_until_on()
        for number in range(20):
            assert [user.put(number, LENGTH + shard, shard=shard) for shard in range(2)] == [DiskStatus.OK] * 2
        assert user.store.find_run(user.class_id, b"".join(map(key_of, range(25)))) == 20
    with DiskUser(tmp_path / "a", shards=2) as user:
        for number in range(20):
            assert all(user.serves(number, LENGTH + shard, shard) for shard in range(2))
        assert user.last.object.depth_grains == 19
        assert user.store.stats()["loaded_total"] == 40
        assert user.get(20) == (DiskStatus.ABSENT, b"")
        assert user.store.audit() is None


@pytest.mark.parametrize("ring", [DiskWay.PROBE, DiskWay.NO])
@pytest.mark.parametrize("direct", [DiskWay.PROBE, DiskWay.NO])
def test_every_way_to_the_device_serves_the_same(tmp_path: Path, ring: DiskWay, direct: DiskWay) -> None:
    with DiskUser(tmp_path / "a", ring=ring, direct=direct) as user:
        user.wait_until_on()
        way = user.store.devices()[0].way
        assert ("thread pool" in way) >= (ring == DiskWay.NO)
        assert ("page cache" in way) >= (direct == DiskWay.NO)
        assert all(user.put(number, LENGTH) == DiskStatus.OK for number in range(8))
        assert all(user.serves(number, LENGTH) for number in range(8))
    with DiskUser(tmp_path / "a") as user:
        assert all(user.serves(number, LENGTH) for number in range(8))


def test_an_object_may_be_as_large_as_a_segment(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a", segment_bytes=256 << 10) as user:
        user.wait_until_on()
        largest = (256 << 10) - 4 * 4096
        assert user.put(1, largest) == DiskStatus.OK
        assert user.serves(1, largest)
        assert user.put(2, largest + 1) == DiskStatus.TOO_LARGE


def test_several_folders_share_the_work(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a", tmp_path / "b") as user:
        user.wait_until_on()
        assert all(user.put(number, LENGTH) == DiskStatus.OK for number in range(40))
    loaded = []
    for alone in ("a", "b"):
        with DiskUser(tmp_path / alone) as user:
            loaded.append(user.store.stats()["loaded_total"])
    assert sum(loaded) == 40
    assert min(loaded) > 10


def test_one_folder_missing_costs_only_what_is_in_it(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a", tmp_path / "b") as user:
        user.wait_until_on()
        assert all(user.put(number, LENGTH) == DiskStatus.OK for number in range(40))
    shutil.rmtree(tmp_path / "b")
    with DiskUser(tmp_path / "a", tmp_path / "b") as user:
        served = sum(user.serves(number, LENGTH) for number in range(40))
        assert served == user.store.stats()["loaded_total"] > 10


def test_events_say_when_all_shards_are_there(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a", shards=2) as user:
        user.wait_until_on()
        user.store.take_events()
        user.put(1, LENGTH, shard=0)
        assert user.store.take_events() == ([], False)
        user.put(1, LENGTH, shard=1)
        (event,), lost = user.store.take_events()
        assert (event.keys, event.is_removed, lost) == (key_of(1), False, False)
        assert [e.keys for e in user.store.snapshot()] == [key_of(1)]
        user.store.drop_class(user.class_id)
        (event,), _ = user.store.take_events()
        assert (event.keys, event.is_removed) == (key_of(1), True)
        assert user.store.snapshot() == []


def test_mooncake_1548_disk_eviction_is_announced(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a") as user:
        user.wait_until_on()
        user.store.take_events()
        present: set[bytes] = set()
        for number in range(300):
            assert user.put(number, LENGTH) == DiskStatus.OK
            events, lost = user.store.take_events()
            assert not lost
            for event in events:
                keys = {event.keys[at : at + 16] for at in range(0, len(event.keys), 16)}
                present = present - keys if event.is_removed else present | keys
        assert user.store.stats()["reclaimed_segments_total"] > 2
        assert present == {e.keys[at : at + 16] for e in user.store.snapshot() for at in range(0, len(e.keys), 16)}
        assert {number for number in range(300) if key_of(number) in present} == {
            number for number in range(300) if user.serves(number, LENGTH)
        }


def test_mooncake_2475_the_size_is_kept_from_the_first_byte(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a") as user:
        user.wait_until_on()
        for number in range(400):
            assert user.put(number, LENGTH) == DiskStatus.OK
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "a").iterdir())
        assert used <= 8 * SEGMENT_BYTES + (64 << 10)
        assert user.store.stats()["segments"] == 8


def test_what_was_dropped_stays_dropped(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a") as user:
        user.wait_until_on()
        for number in range(10):
            user.put(number, LENGTH)
        assert user.store.drop_class(user.class_id) == 10
        user.put(3, LENGTH)
    with DiskUser(tmp_path / "a") as user:
        assert [number for number in range(10) if user.serves(number, LENGTH)] == [3]
        assert user.store.stats()["load_dropped_total"] == 10


def test_time_to_live_is_kept_over_a_restart(tmp_path: Path) -> None:
    now_s = int(time.time())
    with DiskUser(tmp_path / "a") as user:
        user.wait_until_on()
        user.put(1, LENGTH, expires_s=now_s + 3600)
        user.put(2, LENGTH)
        assert user.put(3, LENGTH, expires_s=now_s - 1) == DiskStatus.NOT_WANTED
    with DiskUser(tmp_path / "a") as user:
        assert user.serves(1, LENGTH)
        user.store.poll(now_s=now_s + 3601)
        assert user.store.length(user.class_id, key_of(2), 0) == LENGTH
        assert user.store.find_run(user.class_id, key_of(1)) == 0


def test_only_one_owner_at_a_time(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a"):
        other = DiskStore([tmp_path / "a"], DiskSettings(8 * SEGMENT_BYTES, SEGMENT_BYTES))
        while not other.is_loaded:
            other.poll()
            time.sleep(0.001)
        (device,) = other.devices()
        assert device.state == DiskState.OFF
        assert "another infera-kvd owns the folder" in device.reason
        assert other.close()


def test_somebody_elses_folder_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    store = DiskStore([tmp_path], DiskSettings(8 * SEGMENT_BYTES, SEGMENT_BYTES))
    while not store.is_loaded:
        store.poll()
        time.sleep(0.001)
    (device,) = store.devices()
    assert device.state == DiskState.OFF
    assert "thesis.tex" in device.reason
    assert store.close()
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex"]


def test_the_folder_removed_under_it_is_begun_anew(tmp_path: Path) -> None:
    with DiskUser(tmp_path / "a") as user:
        user.wait_until_on()
        user.put(1, LENGTH)
        shutil.rmtree(tmp_path / "a")
        user.wait(lambda: user.store.stats()["failures_total"] > 0)
        user.wait_until_on()
        assert not user.serves(1, LENGTH)
        assert user.put(2, LENGTH) == DiskStatus.OK
        assert user.serves(2, LENGTH)
    with DiskUser(tmp_path / "a") as user:
        assert user.serves(2, LENGTH)


def test_a_killed_daemons_records_are_there(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        user = DiskUser(tmp_path / "a")
        user.wait_until_on()
        for number in range(60):
            assert user.put(number, LENGTH) == DiskStatus.OK
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(0)
    assert os.read(reading, 1) == b"x"
    os.kill(child, 9)
    os.waitpid(child, 0)
    with DiskUser(tmp_path / "a") as user:
        assert all(user.serves(number, LENGTH) for number in range(60))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"size_bytes": 1 << 20}, "fewer than 4 segments"),
        ({"segment_bytes": 5000}, "a segment has 64 KiB"),
        ({"depth": 0}, "the depth is 1 to 256"),
        ({"entries": 0}, "entries"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, change: dict[str, int], says: str) -> None:
    chosen = {"size_bytes": 8 * SEGMENT_BYTES, "segment_bytes": SEGMENT_BYTES} | change
    with pytest.raises(DiskStoreError, match=says):
        DiskStore([tmp_path], DiskSettings(**chosen))


def test_paths_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(DiskStoreError, match="named twice"):
        DiskStore([tmp_path, tmp_path], DiskSettings(1 << 30))
    with pytest.raises(DiskStoreError, match="1 to 16 folders"):
        DiskStore([], DiskSettings(1 << 30))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 30), st.integers(1, 3)),
        st.tuples(st.just("get"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("drop"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_a_plain_model_never_disagrees(tmp_path: Path, actions: list[tuple[str, int, int]]) -> None:
    """The store may forget (it has room for a part only), but never serves what the model does not have."""
    folder = tmp_path / "a"
    shutil.rmtree(folder, ignore_errors=True)
    model: dict[int, int] = {}
    user = DiskUser(folder, segment_bytes=128 << 10, size_bytes=6 * (128 << 10))
    user.wait_until_on()
    for what, number, retention in actions:
        length = 1000 + 1500 * number
        if what == "put":
            status = user.put(number, length, retention=retention)
            assert status in (DiskStatus.OK, DiskStatus.EXISTS), status
            assert status != DiskStatus.EXISTS or number in model
            model[number] = length
        elif what == "get":
            assert not user.serves(number, length) or model.get(number) == length
        elif what == "drop":
            user.store.drop_class(user.class_id)
            user.store.poll()
            model.clear()
        else:
            user.close()
            user = DiskUser(folder, segment_bytes=128 << 10, size_bytes=6 * (128 << 10))
            user.wait_until_on()
        assert user.store.audit() is None
    small = sum(model.values()) < 2 * (128 << 10)
    for number, length in model.items():
        assert user.serves(number, length) or not small
    user.close()
