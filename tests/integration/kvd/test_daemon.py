"""The real daemon with real client processes: what is shared, what is freed, and what survives whom."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier, Segment
from tests.support.kvd_daemon import DaemonProcess
from tests.support.kvd_user import SPEC, KvdUser, Loaded, UserProcess, key_of, location
from tests.support.processes import ROOT, call, free_port, wait_until

pytestmark = pytest.mark.integration
MakeUser = Callable[[], UserProcess]


# ---- sharing ----


def test_what_one_process_saves_another_loads(daemon: DaemonProcess, new_user: MakeUser) -> None:
    first, second = new_user(), new_user()
    assert first.do("save", *range(100)) == 100
    assert second.do("probe", *range(120)) == 100
    assert second.do("load", *range(100)) == {"found": 100, "damaged": 0, "wrong": 0}
    assert second.do("pins_held") == 0
    first.kill()
    assert second.do("load", *range(100)) == {"found": 100, "damaged": 0, "wrong": 0}
    third = new_user()
    assert third.do("load", *range(100)) == {"found": 100, "damaged": 0, "wrong": 0}
    assert daemon.status(audit=True)["audit"] is None


def test_two_processes_saving_the_same_keys_cost_one_copy(daemon: DaemonProcess, new_user: MakeUser) -> None:
    users = [new_user(), new_user(), new_user()]
    for user in users:
        user.begin("save", *range(300))
    assert sum(user.result() for user in users) == 300
    metrics = daemon.metrics()
    assert (metrics["stored_total"], metrics["records_present"], metrics["records_incomplete"]) == (300, 300, 0)
    assert metrics["used_bytes"] == 300 * 40960
    assert users[0].do("load", *range(300)) == {"found": 300, "damaged": 0, "wrong": 0}


def test_more_than_fits_evicts_and_stays_right(daemon: DaemonProcess, here: KvdUser) -> None:
    keys = [key_of(i) for i in range(4000)]
    assert here.save(keys) == 4000
    metrics = daemon.metrics()
    assert metrics["evicted_total"] > 2000
    assert metrics["records_present"] + metrics["evicted_total"] == 4000
    assert here.load(keys[-500:]) == Loaded(found=500)
    assert here.probe(keys[:1]) == 0


def test_a_batch_larger_than_a_frame_is_cut(daemon: DaemonProcess, here: KvdUser) -> None:
    keys = [key_of(i) for i in range(40_000)]
    grants = here.client.reserve(SPEC, 0, keys, [1] * len(keys))
    assert 1000 < len(grants) < 2000  # what the memory holds; the rest finds no space
    here.client.give_up(grants)
    metrics = daemon.metrics()
    assert (metrics["reservations"], metrics["used_bytes"]) == (0, 0)


# ---- the ends of clients ----


def test_a_killed_client_frees_pins_and_reservations(daemon: DaemonProcess, new_user: MakeUser) -> None:
    """LMCache#1034, #3381: pins that nobody gives back."""
    doomed, other = new_user(), new_user()
    other.do("save", *range(20))
    assert doomed.do("pin", *range(20)) == 20
    assert doomed.do("reserve", *range(100, 110)) == 10
    assert daemon.drop(SPEC.namespace) == 0
    assert other.do("reserve", *range(100, 110)) == 0
    doomed.kill()
    wait_until(lambda: daemon.metrics()["clients"] == 1, "the dead client is gone")
    assert daemon.metrics()["reservations"] == 0
    assert daemon.drop(SPEC.namespace) == 20
    assert other.do("save", *range(100, 110)) == 10
    assert daemon.status(audit=True)["audit"] is None
    assert len(list(daemon.arena.glob("*.ledger"))) == 1


def test_a_dropped_socket_is_not_the_end_of_a_pin(daemon: DaemonProcess, here: KvdUser) -> None:
    here.save([key_of(i) for i in range(5)])
    assert here.pin([key_of(i) for i in range(5)]) == 5
    assert here.reserve([key_of(50)]) == 1
    (before,) = daemon.status()["clients"]
    connects = here.client.connects_total
    assert here.client._connection is not None
    here.client._connection._socket.shutdown(2)
    assert daemon.drop(SPEC.namespace) == 0
    wait_until(lambda: here.client.connects_total > connects and here.client.session(), "it connected again")
    assert daemon.status()["clients"] == [before]
    assert here.pins_held() == 5
    assert daemon.drop(SPEC.namespace) == 0
    here.release()
    assert daemon.drop(SPEC.namespace) == 5
    assert here.client.commit(here.grants, here.copy(here.grants, [key_of(50)])) == 1


def test_a_client_that_leaves_is_forgotten_at_once(daemon: DaemonProcess, new_user: MakeUser) -> None:
    user = new_user()
    user.do("reserve", 1, 2, 3)
    user.do("close")
    wait_until(lambda: daemon.metrics()["clients"] == 0, "the client is gone")
    assert daemon.metrics()["reservations"] == 0
    assert user.do("probe", 1) == 0


def test_a_forked_child_is_not_a_client(daemon: DaemonProcess, new_user: MakeUser) -> None:
    parent = new_user()
    parent.do("save", *range(5))
    assert parent.do("pin", *range(5)) == 5
    assert parent.do("reserve", 77) == 1
    assert parent.do("fork", *range(5)) == [True, 0, 0, 0, 0]
    assert parent.do("pins_held") == 5
    assert daemon.metrics()["clients"] == 1
    assert daemon.drop(SPEC.namespace) == 0
    assert parent.do("finish_copy", 77) == 1
    assert daemon.metrics()["malformed_frames_total"] == 0


# ---- the daemon's ends ----


def test_a_frozen_daemon_holds_nobody_up(daemon: DaemonProcess, here: KvdUser, new_user: MakeUser) -> None:
    """vllm#45387: waiting without end. A call comes back, and the client is one client afterwards."""
    here.save([key_of(i) for i in range(10)])
    daemon.send(signal.SIGSTOP)
    try:
        assert here.load([key_of(i) for i in range(10)]) == Loaded(found=10)  # needs no daemon
        assert here.reserve([key_of(99)]) == 0  # comes back without an answer
        assert here.client.session() is None
        assert here.save([key_of(98)]) == 0
        wait_until(lambda: "does not answer" in here.client._said_unavailable, "several tries failed")
    finally:
        daemon.send(signal.SIGCONT)
    wait_until(lambda: here.client.session() is not None, "connected again")
    assert here.load([key_of(i) for i in range(10)]) == Loaded(found=10)
    wait_until(lambda: daemon.metrics()["connections"] == 2, "abandoned connections are gone")
    assert daemon.metrics()["clients"] == 1
    assert new_user().do("load", *range(10)) == {"found": 10, "damaged": 0, "wrong": 0}


def test_saves_given_up_while_the_daemon_was_frozen_leave_no_space_behind(daemon: DaemonProcess, here: KvdUser) -> None:
    """The daemon answers later, to nobody. What it granted then belonged to a live client that knew nothing of it:
    quarantined after 30 s, for as long as that process lived, and again with each such pause."""
    assert here.save([key_of(1)]) == 1
    for round_number in range(3):
        before = here.client.connects_total
        daemon.freeze()
        assert here.reserve([key_of(100 + 10 * round_number + i) for i in range(10)]) == 0
        daemon.send(signal.SIGCONT)
        wait_until(lambda before=before: here.client.connects_total > before, "the client is back")
    wait_until(lambda: daemon.metrics()["reservations"] == 0, "nothing is held for it")
    assert daemon.metrics()["quarantined_bytes"] == 0
    assert here.probe([key_of(1)]) == 1
    assert daemon.status(audit=True)["audit"] is None


def test_what_is_being_written_survives_a_lost_connection(daemon: DaemonProcess, here: KvdUser) -> None:
    """The other half: what its client does know of stays its own, and can still be committed."""
    keys = [key_of(number) for number in range(5)]
    assert here.reserve(keys) == 5
    before = here.client.connects_total
    daemon.freeze()
    assert here.client.reserve(SPEC, 0, [key_of(50)], [1]) == []
    daemon.send(signal.SIGCONT)
    wait_until(lambda: here.client.connects_total > before, "the client is back")
    wait_until(lambda: daemon.metrics()["reservations"] == 5, "what it knows nothing of is free")
    sums = here.copy(here.grants, keys)
    assert here.client.commit(here.grants, sums) == 5
    assert here.load(keys) == Loaded(found=5)


def test_a_copier_of_another_size_than_the_record_is_refused(daemon: DaemonProcess, here: KvdUser) -> None:
    """A larger one would write over what lies behind the record, which is somebody else's."""
    for size in (SPEC.shard_bytes[0] - 1, SPEC.shard_bytes[0] + 1):
        memory = ctypes.create_string_buffer(size)
        copier = CpuCopier([Segment(ctypes.addressof(memory), size, size)])
        with pytest.raises(ValueError, match="40000 bytes"):
            here.client.put(SPEC, 0, key_of(1), [1], copier, [0])


def test_open_files_do_not_grow_with_clients_that_came_and_went(daemon: DaemonProcess) -> None:
    def come_and_go() -> int:
        client = KvdClient(daemon.socket, "guest", [SPEC])
        client.start()
        assert client.session() is not None
        client.close()
        del client
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    most = max(come_and_go() for _ in range(3))
    for _ in range(10):
        come_and_go()
    # A client's thread may be just ending, and holds what is the client's until then.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most, "ten more came, and left nothing open")


def test_records_hot_in_the_engines_own_cache_are_kept(daemon: DaemonProcess, here: KvdUser) -> None:
    """They are served from the device, so nobody reads them here; without a word they would be the first to go."""
    hot, cold = [key_of(number) for number in range(200)], [key_of(number) for number in range(1000, 1200)]
    for keys in (hot, cold):
        assert here.save(keys) == 200
    touched = here.client.touch(SPEC, b"".join(hot))
    assert touched == 200
    wait_until(lambda: daemon.metrics()["touched_total"] >= touched, "the daemon knows")
    here.save([key_of(number) for number in range(2000, 3500)])
    kept = [sum(here.probe([key]) for key in keys) for keys in (hot, cold)]
    assert kept[0] >= 180, kept  # where many in a row were used, a few give way: a save looks at 64 at most
    assert kept[1] == 0, kept


def test_touch_without_a_daemon_or_keys_does_nothing(daemon: DaemonProcess, here: KvdUser) -> None:
    assert here.client.touch(SPEC, b"") == 0
    with pytest.raises(ValueError, match="16 bytes each"):
        here.client.touch(SPEC, b"short")
    daemon.kill()
    wait_until(lambda: here.client.session() is None, "the client noticed")
    assert here.client.touch(SPEC, key_of(1)) == 0


def test_a_client_without_a_daemon_finds_it_later(daemon: DaemonProcess) -> None:
    daemon.stop()
    user = KvdUser(daemon.socket)
    assert user.client.session() is None
    assert user.save([key_of(1)]) == 0
    daemon.start()
    wait_until(lambda: user.client.session() is not None, "connected")
    assert user.save([key_of(1)]) == 1
    user.client.close()


def test_a_class_that_is_refused_does_not_use_up_clients(daemon: DaemonProcess) -> None:
    """Every try says HELLO; all of them are one client."""
    spec = RecordSpec(b"too-large-record", 0, (1 << 30,), "m")
    client = KvdClient(daemon.socket, "misfit", [spec])
    client.start()
    for _ in range(3):
        client._connect()
    assert daemon.metrics()["clients"] == 1
    assert "does not fit the arena" in client._said_unavailable
    assert client.reserve(spec, 0, [key_of(1)], [1]) == []
    client.close()


# ---- damage ----


def test_flipped_bytes_are_found_when_loaded_and_the_record_goes(daemon: DaemonProcess, here: KvdUser) -> None:
    """vllm#54363: right length, wrong bytes must not pass."""
    keys = [key_of(i) for i in range(10)]
    here.save(keys)
    run = here.client.pin_run(SPEC, b"".join(keys))
    assert run is not None
    (data,) = daemon.arena.glob("*.data")
    with data.open("r+b") as file:
        for position in (2, 7):
            file.seek(location(run, run.slots[position]).offset_bytes + 39_999)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    run.release()
    assert here.load(keys) == Loaded(found=10, damaged=2)
    wait_until(lambda: daemon.metrics()["damaged_total"] == 2, "the damaged records were dropped")
    assert here.probe(keys) == 2
    assert here.save(keys) == 2
    assert here.load(keys) == Loaded(found=10)
    assert daemon.status(audit=True)["audit"] is None


def test_a_client_cannot_get_at_the_index_for_writing(daemon: DaemonProcess, here: KvdUser) -> None:
    import mmap
    import os

    from kvd.client.connection import ClientConnection

    connection = ClientConnection.open(daemon.socket, timeout_s=10)
    _, descriptors = connection.hello("curious")
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], 0)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.close()


# ---- pages and commands ----


def test_pages() -> None:
    port = free_port()
    daemon = DaemonProcess("--http-port", str(port))
    try:
        daemon.start()
        user = KvdUser(daemon.socket)
        user.save([key_of(i) for i in range(7)])
        for page in ("health", "ready"):
            assert call(f"http://127.0.0.1:{port}/{page}").json["instance"] == daemon.status()["instance"]
        text = call(f"http://127.0.0.1:{port}/metrics").body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["infera_kvd_records_present"].samples[0].value == 7
        assert families["infera_kvd_stored"].type == "counter"
        assert len(families) > 20
        assert call(f"http://127.0.0.1:{port}/other").status == 404
        assert call(f"http://127.0.0.1:{port}/health", body={}).status == 405
        user.client.close()
    finally:
        daemon.clean_up()


def run_command(daemon: DaemonProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", *words, "--socket", str(daemon.socket)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_status_and_drop_commands(daemon: DaemonProcess, here: KvdUser) -> None:
    here.save([key_of(i) for i in range(3)])
    shown = run_command(daemon, "status")
    assert shown.returncode == 0
    assert re.search(r"records +3 present", shown.stdout)
    assert f"namespace {SPEC.namespace.hex()} group 0 model test-model" in shown.stdout
    machine = run_command(daemon, "status", "--json")
    assert '"records_present": 3' in machine.stdout
    assert len(machine.stdout.splitlines()) == 1
    wrong = run_command(daemon, "drop", "ab" * 16)
    assert wrong.returncode == 1
    assert SPEC.namespace.hex() in wrong.stderr
    assert run_command(daemon, "drop", SPEC.namespace.hex()).stdout == "dropped 3 records\n"
    assert here.probe([key_of(0)]) == 0


def test_a_second_daemon_is_refused_in_words(daemon: DaemonProcess, here: KvdUser, tmp_path: Path) -> None:
    here.save([key_of(1)])
    same_folder = [*daemon.command(), "--memory", "1M", "--http-port", "0"]
    same_folder[same_folder.index("--socket") + 1] = str(tmp_path / "other.sock")
    same_socket = [*daemon.command(), "--memory", "1M", "--http-port", "0"]
    same_socket[same_socket.index("--path") + 1] = str(tmp_path / "arena")
    assert daemon.popen is not None
    for command, says in (
        (same_folder, rf"another infera-kvd \(pid {daemon.popen.pid}\) owns .*--path"),
        (same_socket, r"another infera-kvd listens on .*--socket"),
    ):
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        assert ended.returncode == 1
        assert re.search(says, ended.stderr)
        assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
    assert here.load([key_of(1)]) == Loaded(found=1)
