"""The daemon goes and comes back over the same files, however it went; clients go on by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier, Segment
from tests.support.kvd_daemon import DaemonProcess
from tests.support.kvd_user import SPEC, KvdUser, Loaded, UserProcess, content_of, key_of
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.integration
MakeUser = Callable[[], UserProcess]


def all_found(count: int) -> dict[str, int]:
    return {"found": count, "damaged": 0, "wrong": 0}


def is_back(daemon: DaemonProcess, user: UserProcess | KvdClient) -> None:
    """Wait until a client is connected to the daemon that runs now."""
    pid = user.popen.pid if isinstance(user, UserProcess) else os.getpid()
    wait_until(
        lambda: any(client["pid"] == pid and client["connections"] for client in daemon.status()["clients"]),
        f"process {pid} has connected again",
    )
    if isinstance(user, UserProcess):
        wait_until(lambda: user.do("is_connected"), "its session stands")
    else:
        wait_until(user.session, "its session stands")


def flags_of(daemon: DaemonProcess, memory: str, *more: str) -> None:
    daemon.flags = ["--memory", memory, "--http-port", "0", *more]


def names(daemon: DaemonProcess, pattern: str) -> set[str]:
    return {path.name for path in daemon.arena.glob(pattern)}


# ---- going and coming back ----


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_was_saved_is_served_to_the_same_clients_and_to_new_ones(
    daemon: DaemonProcess, new_user: MakeUser, end: str
) -> None:
    users = [new_user(), new_user()]
    assert sum(user.do("save", *range(100)) for user in users) == 100
    before, arenas, files = daemon.status(), [user.do("arena") for user in users], names(daemon, "*")
    for life in range(3):
        getattr(daemon, end)()
        for user in users:  # needs no daemon once the session stands; without one it is a miss
            loaded = user.do("load", *range(100))
            assert (loaded["damaged"], loaded["wrong"]) == (0, 0)
        daemon.start()
        for user, arena in zip(users, arenas, strict=True):
            is_back(daemon, user)
            assert user.do("arena") == arena  # the same mapping goes on
            assert user.do("load", *range(100)) == all_found(100)
        newcomer = new_user()
        assert newcomer.do("load", *range(100)) == all_found(100)
        newcomer.kill()
        wait_until(lambda: daemon.metrics()["clients"] == 2, "the newcomer is gone")
        after = daemon.status(audit=True)
        assert after["audit"] is None
        assert (after["instance"], after["clients"]) == (before["instance"], before["clients"])
        assert names(daemon, "*") == files
        metrics = after["metrics"]
        assert (metrics["adopted_total"], metrics["used_bytes"]) == (100 + 10 * life, (100 + 10 * life) * 40_960)
        assert metrics["event_sequence"] > before["metrics"]["event_sequence"]
        assert users[0].do("save", *range(1000 + 10 * life, 1010 + 10 * life)) == 10
    assert users[1].do("load", *range(1000, 1030)) == all_found(30)
    assert "Traceback" not in daemon.log_text()


def test_sigterm_keeps_the_files_and_says_how_to_free_them(daemon: DaemonProcess, here: KvdUser) -> None:
    here.save([key_of(1)])
    assert here.pin([key_of(1)]) == 1
    assert daemon.stop() == 0
    assert {path.suffix for path in daemon.arena.iterdir()} == {"", ".index", ".data", ".ledger"}
    assert [path.name for path in daemon.runtime.iterdir()] == ["log"]
    assert f"infera-kvd clear --path {daemon.arena}" in daemon.log_text()
    wait_until(lambda: here.client.session() is None, "the client noticed")
    assert here.reserve([key_of(2)]) == 0
    assert here.probe([key_of(1)]) == 0
    here.release()


def test_a_client_closed_while_no_daemon_was_there_is_not_taken_over_for_ever(
    daemon: DaemonProcess, here: KvdUser
) -> None:
    """Its process lives on, but nothing of it uses the arena any more."""
    assert here.reserve([key_of(1)]) == 1
    daemon.kill()
    here.grants.clear()
    here.client.close()
    daemon.start()
    wait_until(lambda: daemon.metrics()["clients"] == 0, "the client is forgotten")
    assert daemon.metrics()["quarantined_bytes"] == 0


def test_pins_hold_across_a_restart(daemon: DaemonProcess, new_user: MakeUser) -> None:
    holder, other = new_user(), new_user()
    other.do("save", *range(20))
    assert holder.do("pin", *range(20)) == 20
    daemon.kill()
    daemon.start()
    assert daemon.drop(SPEC.namespace) == 0  # also before the holder has said HELLO
    is_back(daemon, holder)
    assert holder.do("pins_held") == 20
    assert daemon.drop(SPEC.namespace) == 0
    holder.do("release")
    assert daemon.drop(SPEC.namespace) == 20


def test_a_record_with_one_of_two_shards_is_dropped(daemon: DaemonProcess) -> None:
    """Killed between the two commits of a record."""
    spec = RecordSpec(b"two-shard-record", 0, (5000, 6000), "m")
    client = KvdClient(daemon.socket, "two ranks", [spec])
    client.start()
    for number, shards in ((1, (0, 1)), (2, (0,))):
        for shard in shards:
            grants = client.reserve(spec, shard, [key_of(number)], [1])
            assert client.commit(grants, [0]) == 1
    (left_open,) = client.reserve(spec, 1, [key_of(2)], [1])
    daemon.kill()
    daemon.start()
    is_back(daemon, client)
    assert (client.probe_run(spec, key_of(1)), client.probe_run(spec, key_of(2))) == (1, 0)
    metrics = daemon.metrics()
    assert (metrics["adopted_total"], metrics["adopt_dropped_incomplete_total"]) == (1, 1)
    assert metrics["quarantined_bytes"] == 8192  # the second rank may still be copying
    assert client.commit([left_open], [0]) == 0
    assert daemon.metrics()["quarantined_bytes"] == 0
    client.close()


def test_a_half_updated_record_is_dropped_and_counted(daemon: DaemonProcess, here: KvdUser) -> None:
    here.save([key_of(i) for i in range(10)])
    daemon.kill()
    (path,) = daemon.arena.glob("*.index")
    with path.open("r+b") as file:
        content = file.read()
        at = content.index(key_of(4)) - 8
        file.seek(at)
        file.write((int.from_bytes(content[at : at + 8], "little") + 1).to_bytes(8, "little"))
    daemon.start()
    is_back(daemon, here.client)
    metrics = daemon.metrics()
    assert (metrics["adopted_total"], metrics["adopt_dropped_half_total"]) == (9, 1)
    assert [here.probe([key_of(i)]) for i in range(10)] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert here.save([key_of(4)]) == 1
    assert here.load([key_of(i) for i in range(10)]) == Loaded(found=10)


def test_saves_left_in_the_ring_are_taken_in_by_the_next_daemon(daemon: DaemonProcess) -> None:
    import ctypes

    spec = RecordSpec(b"namespace-number", 0, (40_000,), "test-model")
    client = KvdClient(daemon.socket, "ring", [spec], saves_shard=0)
    client.start()
    keys = [key_of(i) for i in range(10)]
    memory = ctypes.create_string_buffer(b"".join(content_of(key, 40_000) for key in keys), 400_000)
    copier = CpuCopier([Segment(ctypes.addressof(memory), 40_000, 40_000)])
    daemon.send(signal.SIGSTOP)
    assert client.put(spec, 0, b"".join(keys), [1] * 10, copier, range(10)) == 10
    daemon.kill()
    daemon.start()
    is_back(daemon, client)
    wait_until(lambda: client.probe_run(spec, b"".join(keys)) == 10, "the ring was drained")
    user = KvdUser(daemon.socket)
    assert user.load(keys) == Loaded(found=10)
    assert client.put(spec, 0, key_of(50), [1], copier, [0]) == 1  # its doorbell is the new daemon's
    wait_until(lambda: client.probe_run(spec, key_of(50)) == 1, "it was taken in")
    user.client.close()
    client.close()


# ---- space that somebody may still be writing to ----


def test_a_client_frozen_in_a_copy_across_a_restart_harms_nobody(daemon: DaemonProcess, new_user: MakeUser) -> None:
    """Mooncake#1336: a restart must not hand out again what a live process writes to."""
    frozen, other = new_user(), new_user()
    assert frozen.do("reserve", *range(100, 130)) == 30
    frozen.begin("scribble", 2)
    time.sleep(0.3)
    frozen.popen.send_signal(signal.SIGSTOP)
    try:
        daemon.kill()
        daemon.start()
        is_back(daemon, other)
        assert daemon.metrics()["quarantined_bytes"] == 30 * 40_960
        for start in range(1000, 9000, 1000):  # many times what fits
            other.do("save", *range(start, start + 1000))
        present = [number for number in range(8000, 9000) if other.do("probe", number)]
        assert len(present) > 900
    finally:
        frozen.popen.send_signal(signal.SIGCONT)
    assert frozen.result() == 0  # its commit is refused: the record is gone
    assert other.do("load", *present) == all_found(len(present))
    wait_until(lambda: daemon.metrics()["quarantined_bytes"] == 0, "the space came back")
    assert frozen.do("save", 77) == 1
    status = daemon.status(audit=True)
    assert (status["audit"], status["metrics"]["reservations"]) == (None, 0)


def test_a_client_that_goes_on_copying_after_the_restart_harms_nobody(
    daemon: DaemonProcess, new_user: MakeUser
) -> None:
    """It connects again in the middle of its copy; its space is kept until it says that it is done."""
    user, other = new_user(), new_user()
    assert user.do("reserve", *range(20)) == 20
    daemon.kill()
    daemon.start()
    for client in (user, other):
        is_back(daemon, client)
    assert daemon.metrics()["quarantined_bytes"] == 20 * 40_960
    assert other.do("reserve", *range(20)) == 20
    assert user.do("finish_copy", *range(20)) == 0
    assert daemon.metrics()["quarantined_bytes"] == 0
    assert other.do("finish_copy", *range(20)) == 20
    assert user.do("load", *range(20)) == all_found(20)


def test_a_client_that_died_with_the_daemon_leaves_nothing(daemon: DaemonProcess, new_user: MakeUser) -> None:
    doomed, other = new_user(), new_user()
    other.do("save", *range(20))
    doomed.do("pin", *range(20))
    doomed.do("reserve", *range(100, 110))
    daemon.kill()
    doomed.kill()
    daemon.start()
    is_back(daemon, other)
    metrics = daemon.metrics()
    assert (metrics["clients"], metrics["reservations"], metrics["quarantined_bytes"]) == (1, 0, 0)
    assert len(names(daemon, "*.ledger")) == 1
    assert daemon.drop(SPEC.namespace) == 20


def test_a_client_that_dies_before_it_came_back_is_noticed(daemon: DaemonProcess, new_user: MakeUser) -> None:
    doomed = new_user()
    doomed.do("save", *range(20))
    doomed.do("pin", *range(20))
    doomed.do("reserve", *range(100, 110))
    doomed.popen.send_signal(signal.SIGSTOP)
    daemon.kill()
    daemon.start()
    metrics = daemon.metrics()
    assert (metrics["clients"], metrics["reservations"]) == (1, 10)
    assert daemon.drop(SPEC.namespace) == 0
    doomed.kill()
    wait_until(lambda: daemon.metrics()["clients"] == 0, "its lock is free")
    assert daemon.metrics()["reservations"] == 0
    assert names(daemon, "*.ledger") == set()
    assert daemon.drop(SPEC.namespace) == 20


def test_a_forked_child_does_not_keep_its_dead_parent_alive(daemon: DaemonProcess, new_user: MakeUser) -> None:
    parent = new_user()
    parent.do("save", *range(5))
    child = parent.do("leave_a_child")
    try:
        daemon.kill()
        parent.kill()
        daemon.start()
        assert daemon.metrics()["clients"] == 0
        assert names(daemon, "*.ledger") == set()
    finally:
        os.kill(child, signal.SIGKILL)


# ---- what cannot be adopted ----


def test_another_size_begins_anew_and_says_so(daemon: DaemonProcess, new_user: MakeUser) -> None:
    user = new_user()
    user.do("save", *range(50))
    files = names(daemon, "*.data")
    for memory, more in (("32M", ()), ("32M", ("--records", "5000")), ("32M", ("--shards-max", "2"))):
        daemon.stop()
        flags_of(daemon, memory, *more)
        said_before = len(daemon.log_text())
        daemon.start()
        assert "cannot be used: it has" in daemon.log_text()[said_before:]
        assert len(names(daemon, "*.data")) == 1
        assert names(daemon, "*.data") != files
        files = names(daemon, "*.data")
        is_back(daemon, user)
        assert user.do("probe", *range(50)) == 0
        assert user.do("save", *range(50)) == 50
        assert user.do("load", *range(50)) == all_found(50)
    daemon.kill()
    daemon.start()
    is_back(daemon, user)
    assert user.do("load", *range(50)) == all_found(50)


@pytest.mark.parametrize(("at", "says"), [(8, "layout version 98"), (64, "damaged"), (0, "never finished")])
def test_a_header_that_is_refused_begins_anew_and_says_so(daemon: DaemonProcess, at: int, says: str) -> None:
    user = KvdUser(daemon.socket)
    user.save([key_of(1)])
    user.client.close()
    daemon.stop()
    (path,) = daemon.arena.glob("*.index")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x62")
    daemon.start()
    assert says in daemon.log_text()
    user = KvdUser(daemon.socket)
    assert user.probe([key_of(1)]) == 0
    assert user.save([key_of(1)]) == 1
    user.client.close()


@pytest.mark.parametrize("left", ["nothing written", "no data", "empty files", "half a data file"])
def test_left_overs_of_a_killed_start_are_taken_over_cleanly(daemon: DaemonProcess, left: str) -> None:
    """vllm#51579, vllm#57303: what a killed run left made every following start crash."""
    daemon.kill()
    (index,), (data,) = daemon.arena.glob("*.index"), daemon.arena.glob("*.data")
    (daemon.arena / "00112233445566aa.ledger").write_bytes(b"" if left == "empty files" else bytes(100_000))
    if left == "nothing written":
        index.write_bytes(bytes(index.stat().st_size))
    if left == "no data":
        data.unlink()
    if left == "empty files":
        index.write_bytes(b"")
        data.write_bytes(b"")
    if left == "half a data file":
        os.truncate(data, data.stat().st_size // 2)
    for _ in range(2):
        daemon.start()
        user = KvdUser(daemon.socket)
        assert user.save([key_of(i) for i in range(10)]) in (0, 10)
        assert user.load([key_of(i) for i in range(10)]) == Loaded(found=10)
        user.client.close()
        assert len(names(daemon, "*")) == 3  # lock, index, data
        daemon.kill()
    log = daemon.log_text()
    assert "cannot be used" in log
    assert "Traceback" not in log


def test_a_restart_neither_forgets_what_it_holds_nor_reuses_its_space(
    daemon: DaemonProcess, new_user: MakeUser
) -> None:
    """Mooncake#1336: after a restart the data was forgotten, and its space was overwritten under readers."""
    user = new_user()
    user.do("save", *range(3000))  # twice what fits
    present = [number for number in range(3000) if user.do("probe", number)]
    used = daemon.metrics()["used_bytes"]
    assert used > 60 << 20
    assert user.do("pin", *present[-50:]) == 50
    daemon.kill()
    daemon.start()
    assert daemon.metrics()["used_bytes"] == used
    is_back(daemon, user)
    assert user.do("load", *present) == all_found(len(present))
    other = new_user()
    other.do("save", *range(5000, 8000))
    assert other.do("load", *present[-50:]) == all_found(50)
    assert other.do("load", *range(7900, 8000)) == all_found(100)
    assert daemon.status(audit=True)["audit"] is None


# ---- infera-kvd clear ----


def clear(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", "clear", "--path", str(path), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_clear_frees_what_nobody_uses(daemon: DaemonProcess, new_user: MakeUser) -> None:
    user = new_user()
    refused = clear(daemon.arena)
    assert refused.returncode == 1
    assert "another infera-kvd" in refused.stderr
    daemon.stop()
    refused = clear(daemon.arena)
    assert refused.returncode == 1
    assert "1 processes still use the arena" in refused.stderr
    user.kill()
    done = clear(daemon.arena)
    assert (done.returncode, done.stderr) == (0, "")
    assert "freed 6" in done.stdout
    assert names(daemon, "*") == {"lock"}
    assert json.loads(clear(daemon.arena, "--json").stdout) == {"freed_bytes": 0}
    assert clear(daemon.arena / "not-there").returncode == 0
    daemon.start()
    assert daemon.metrics()["adopted_total"] == 0
