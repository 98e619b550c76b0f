"""The daemon and peers that are wrong, foreign, or broken: answered or shown out, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from infera_core import lib

from kvd import protocol
from kvd.client.connection import ClientConnection
from kvd.protocol import FrameReader, Kind, Message, RefusedError, encode, encode_json
from tests.support.kvd_daemon import DaemonProcess
from tests.support.kvd_user import KvdUser, Loaded, key_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    made = DaemonProcess()
    try:
        yield made.start()
        assert made.status(audit=True)["audit"] is None
        assert "Traceback" not in made.log_text()
    finally:
        made.clean_up()


@pytest.fixture(autouse=True)
def _daemon_goes_on(daemon: DaemonProcess) -> Iterator[None]:
    """Whatever a test does to it, the daemon serves others as before and keeps nothing."""
    yield
    user = KvdUser(daemon.socket)
    user.save([key_of(i) for i in range(3)])
    assert user.load([key_of(i) for i in range(3)]) == Loaded(found=3)
    user.client.close()
    wait_until(lambda: daemon.metrics()["clients"] == 0, "no client is left")
    wait_until(lambda: daemon.metrics()["connections"] == 1, "no connection is left")
    assert daemon.metrics()["reservations"] == 0
    assert list(daemon.arena.glob("*.ledger")) == []


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.socket))
        yield sock


def answers(sock: socket.socket) -> list[protocol.Frame]:
    """All frames until the daemon closes."""
    reader, frames = FrameReader(), []
    while data := sock.recv(65536):
        reader.feed(data)
        while frame := reader.next_frame():
            frames.append(frame)
    return frames


def ask(sock: socket.socket, message: int, payload: bytes, *descriptors: int) -> protocol.Frame:
    frame_bytes = encode(message, Kind.REQUEST, 9, payload)
    sent = socket.send_fds(sock, [frame_bytes], list(descriptors))
    if sent < len(frame_bytes):
        sock.sendall(frame_bytes[sent:])
    reader = FrameReader()
    while (frame := reader.next_frame()) is None:
        data, received, _, _ = socket.recv_fds(sock, 65536, 8)
        for descriptor in received:
            os.close(descriptor)
        assert data, "the daemon closed the connection"
        reader.feed(data)
    return frame


def hello(**changes: Any) -> bytes:
    return encode_json({"protocol": [protocol.PROTOCOL_VERSION], "role": "engine", "name": "raw", "pid": 1} | changes)


def introduce(sock: socket.socket) -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert ask(sock, Message.HELLO, hello(), pidfd).kind == Kind.ANSWER
    os.close(pidfd)


def bye(sock: socket.socket) -> None:
    assert ask(sock, Message.BYE, b"").kind == Kind.ANSWER


@pytest.mark.parametrize("versions", [[99], [], "1", None, {"1": 1}, [[1]]])
def test_another_protocol_version_is_refused_in_words(raw: socket.socket, versions: object) -> None:
    pidfd = os.pidfd_open(os.getpid())
    frame = ask(raw, Message.HELLO, hello(protocol=versions), pidfd)
    os.close(pidfd)
    assert frame.kind == Kind.ERROR
    assert b"install the same Infera version on both sides" in frame.payload


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(16),
        protocol.HEADER.pack(protocol.FRAME_BYTES_MAX + 1, 1, 0, 1, protocol.MAGIC),
        protocol.HEADER.pack(2**32 - 1, 1, 0, 1, protocol.MAGIC),
        encode(Message.HELLO, Kind.ANSWER, 1, b"{}"),
        encode(Message.HELLO, Kind.ERROR, 1, b"{}"),
    ],
    ids=["http", "zeroes", "giant frame", "largest length", "an answer", "an error"],
)
def test_what_is_not_the_protocol_is_answered_counted_and_closed(
    daemon: DaemonProcess, raw: socket.socket, sent: bytes
) -> None:
    before = daemon.metrics()["malformed_frames_total"]
    raw.sendall(sent)
    (frame,) = answers(raw)
    assert frame.kind == Kind.ERROR
    assert daemon.metrics()["malformed_frames_total"] == before + 1


@pytest.mark.parametrize("length", [0, 1, 15, 16, 40])
def test_half_a_frame_and_then_silence_or_the_end(daemon: DaemonProcess, raw: socket.socket, length: int) -> None:
    raw.sendall(encode(Message.HELLO, Kind.REQUEST, 1, hello())[:length])
    assert daemon.metrics()["connections"] == 2  # it waits, and others are served
    raw.close()


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Message.HELLO, b"not json"),
        (Message.HELLO, b"[]"),
        (Message.HELLO, b"[" * 200_000),
        (Message.OPEN, b"{}"),
        (Message.RESERVE, b""),
        (Message.COMMIT, bytes(16)),
        (Message.STATUS, b"[1]"),
        (Message.DROP, b"{}"),
        (0, b""),
        (65535, b"x" * 100),
    ],
)
def test_a_bad_request_before_hello_is_refused_and_the_connection_goes_on(
    raw: socket.socket, message: int, payload: bytes
) -> None:
    assert ask(raw, message, payload).kind == Kind.ERROR
    assert ask(raw, Message.STATUS, b"").kind == Kind.ANSWER


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Message.HELLO, hello()),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": -1, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": True, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 2**32, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "AB" * 16, "group": 0, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "ab  " * 8, "group": 0, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "zz" * 16, "group": 0, "shard_bytes": [1]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": []})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [0]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [-5]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [True]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [2**70]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [2**62]})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [1] * 9})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [1], "model": "\ud800"})),
        (Message.OPEN, encode_json({"namespace": "ab" * 16, "group": 0, "shard_bytes": [1], "model": "m" * 5000})),
        (Message.RESERVE, b""),
        (Message.RESERVE, bytes(15)),
        (Message.RESERVE, bytes(16)),
        (Message.RESERVE, bytes(16 + 23)),
        (Message.RESERVE, bytes(16 + 24 * (protocol.BATCH_MAX + 1))),
        (Message.COMMIT, b""),
        (Message.COMMIT, bytes(15)),
        (Message.COMMIT, bytes(16 * (protocol.BATCH_MAX + 1))),
        (Message.GIVE_UP, bytes(7)),
        (Message.TOUCH, bytes(3)),
        (Message.TOUCH, bytes(5)),
        (Message.VERIFY, bytes(4)),
        (Message.VERIFY, bytes(4 + 16 * (protocol.VERIFY_BATCH_MAX + 1))),
        (77, b""),
    ],
)  # fmt: skip
def test_a_bad_request_of_an_engine_is_refused_and_the_connection_goes_on(
    raw: socket.socket, message: int, payload: bytes
) -> None:
    introduce(raw)
    frame = ask(raw, message, payload)
    assert frame.kind == Kind.ERROR
    assert frame.payload
    assert ask(raw, Message.STATUS, b"").kind == Kind.ANSWER
    bye(raw)


def test_numbers_that_mean_nothing_do_nothing(raw: socket.socket) -> None:
    introduce(raw)
    grants = ask(raw, Message.RESERVE, b"\xff" * 24 + bytes(24)).payload
    assert [status for _, _, status, _ in protocol.GRANT.iter_unpack(grants)] == [lib.STORE_BAD_REQUEST]
    assert ask(raw, Message.COMMIT, b"\xff" * 16).payload[0] != 0
    assert ask(raw, Message.GIVE_UP, b"\xff" * 8).kind == Kind.ANSWER
    assert ask(raw, Message.TOUCH, b"\xff" * 4 + bytes(16)).kind == Kind.ANSWER
    assert ask(raw, Message.VERIFY, b"\xff" * 4 + bytes(16)).kind == Kind.ANSWER
    bye(raw)


@pytest.mark.parametrize("kind", ["none", "reader", "writer", "regular file", "socket"])
def test_an_engine_without_a_process_descriptor_is_refused(raw: socket.socket, kind: str) -> None:
    reader, writer = os.pipe()
    regular = os.open("/proc/self/status", os.O_RDONLY)
    given = {"none": [], "reader": [reader], "writer": [writer], "regular file": [regular], "socket": [raw.fileno()]}
    frame = ask(raw, Message.HELLO, hello(), *given[kind])
    assert frame.kind == Kind.ERROR
    assert b"pidfd" in frame.payload
    for descriptor in (reader, writer, regular):
        os.close(descriptor)


def test_a_hello_with_a_nonsense_pid_leaves_no_client(daemon: DaemonProcess, raw: socket.socket) -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert ask(raw, Message.HELLO, hello(pid="many"), pidfd).kind == Kind.ERROR
    os.close(pidfd)
    assert daemon.metrics()["clients"] == 0


def test_a_client_that_left_before_the_answer_to_hello_is_forgotten(daemon: DaemonProcess) -> None:
    """It does not know its ledger, so it will come as a new one: a slow daemon must not fill up with these."""
    pidfd = os.pidfd_open(os.getpid())
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            socket.send_fds(sock, [encode(Message.HELLO, Kind.REQUEST, 1, hello())], [pidfd])
    os.close(pidfd)
    wait_until(lambda: daemon.metrics()["connections"] == 1, "all are gone")
    assert daemon.metrics()["clients"] == 0


def facts_of(frame: protocol.Frame) -> dict[str, Any]:
    """What a HELLO's answer says, as far as one needs it to come back."""
    said = json.loads(frame.payload)
    return {name: said[name] for name in ("instance", "client", "token")}


def say_hello(sock: socket.socket, **changes: Any) -> dict[str, Any]:
    pidfd = os.pidfd_open(os.getpid())
    try:
        frame = ask(sock, Message.HELLO, hello(**changes), pidfd)
    finally:
        os.close(pidfd)
    assert frame.kind == Kind.ANSWER
    return facts_of(frame)


@pytest.mark.parametrize("name", ["\ud800", "\ud800" * 100, "x" * 100_000, None, ["a"], 5])
def test_a_hello_with_a_nonsense_name_leaves_no_client(daemon: DaemonProcess, raw: socket.socket, name: object) -> None:
    """One that cannot be written down used up a client's place and ledger for as long as the daemon ran."""
    pidfd = os.pidfd_open(os.getpid())
    frame = ask(raw, Message.HELLO, hello(name=name), pidfd)
    os.close(pidfd)
    assert daemon.metrics()["clients"] == (frame.kind == Kind.ANSWER)
    if frame.kind == Kind.ANSWER:
        bye(raw)


def test_a_client_that_leaves_on_two_connections_takes_nobody_along(daemon: DaemonProcess, raw: socket.socket) -> None:
    """After the first BYE its number may be somebody else's; the second must not end that one."""
    me = say_hello(raw)
    with socket.socket(socket.AF_UNIX) as again:
        again.settimeout(10)
        again.connect(str(daemon.socket))
        assert say_hello(again, **me) == me
        bye(raw)
        innocent = KvdUser(daemon.socket)
        innocent.save([key_of(7)])
        assert innocent.pin([key_of(7)]) == 1
        (client,) = daemon.status()["clients"]
        assert client["number"] == me["client"], "the number was given again"
        with contextlib.suppress(OSError):
            again.sendall(encode(Message.BYE, Kind.REQUEST, 1, b""))
        assert again.recv(1000) == b"", "it was closed with the first"
        assert daemon.status()["clients"] == [client]
        daemon.drop(innocent.spec.namespace)
        assert daemon.metrics()["records_present"] == 1, "its pin counts"
        innocent.release()
        innocent.client.close()


def test_a_client_that_has_locked_its_ledger_lives_on_without_a_connection(
    daemon: DaemonProcess, raw: socket.socket
) -> None:
    """It may look up, pin and read without another word to the daemon."""
    connection = ClientConnection.open(daemon.socket, timeout_s=10)
    _, descriptors = connection.hello("quiet")
    fcntl.flock(descriptors[4], fcntl.LOCK_EX | fcntl.LOCK_NB)
    before = daemon.metrics()["connections"]
    connection.close()
    wait_until(lambda: daemon.metrics()["connections"] == before - 1, "its connection is gone")
    assert [client["name"] for client in daemon.status()["clients"]] == ["quiet"]
    for descriptor in descriptors:
        os.close(descriptor)
    wait_until(lambda: daemon.metrics()["clients"] == 0, "the lock is gone, and the client with it")


def test_a_wrong_token_does_not_resume_a_client(daemon: DaemonProcess, raw: socket.socket) -> None:
    introduce(raw)
    (client,) = daemon.status()["clients"]
    claim = {"instance": daemon.status()["instance"], "client": client["number"], "token": 0}
    connection = ClientConnection.open(daemon.socket, timeout_s=10)
    facts, descriptors = connection.hello("thief", claim)
    assert facts["client"] != client["number"]
    for descriptor in descriptors:
        os.close(descriptor)
    connection.close()
    bye(raw)


def test_more_than_one_descriptor_and_unasked_ones_are_closed(raw: socket.socket) -> None:
    descriptors = [os.open("/proc/self/status", os.O_RDONLY) for _ in range(8)]
    for _ in range(50):
        assert ask(raw, Message.STATUS, b"", *descriptors).kind == Kind.ANSWER
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_client_that_does_not_read_is_shown_out(daemon: DaemonProcess, raw: socket.socket) -> None:
    request = encode(Message.STATUS, Kind.REQUEST, 1, b"")
    raw.setblocking(True)
    raw.settimeout(20)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        raw.sendall(request * 100_000)


def test_hello_behind_a_queue_of_answers_is_refused_not_garbled(daemon: DaemonProcess, raw: socket.socket) -> None:
    """Descriptors go out at once; they must not overtake what was sent before them."""
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(
        raw,
        [encode(Message.STATUS, Kind.REQUEST, 1, b"") * 1500 + encode(Message.HELLO, Kind.REQUEST, 2, hello())],
        [pidfd],
    )
    os.close(pidfd)
    reader, count = FrameReader(), 0
    while True:
        frame = reader.next_frame()
        if frame is None:
            data, received, _, _ = socket.recv_fds(raw, 4096, 8)
            for descriptor in received:
                os.close(descriptor)
            reader.feed(data)
            continue
        count += 1
        if frame.request_id == 2:
            break
        assert json.loads(frame.payload)["pid"] == daemon.status()["pid"] if count % 500 == 0 else True
    assert count == 1501
    if frame.kind == Kind.ANSWER:
        bye(raw)
    else:
        assert b"HELLO comes first" in frame.payload


FOREIGNER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    try:
        sock.connect(sys.argv[1])
    except PermissionError:
        print("no permission")
    else:
        print(sock.recv(4096)[16:].decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_kept_out_twice(daemon: DaemonProcess) -> None:
    """By the socket's mode, and where that was loosened, by the daemon."""
    daemon.runtime.chmod(0o755)

    def as_foreigner() -> str:
        command = [sys.executable, "-c", FOREIGNER, str(daemon.socket)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    assert as_foreigner() == "no permission\n"
    before = daemon.metrics()["refused_peers_total"]
    daemon.socket.chmod(0o666)
    assert as_foreigner() == "this infera-kvd serves user 0, not user 65534\n"
    daemon.socket.chmod(0o600)
    assert daemon.metrics()["refused_peers_total"] == before + 1


def test_out_of_descriptors_is_waited_out_not_spun_on() -> None:
    daemon = DaemonProcess()
    try:
        daemon.start()
        assert daemon.popen is not None
        used = len(os.listdir(f"/proc/{daemon.popen.pid}/fd"))
        resource.prlimit(daemon.popen.pid, resource.RLIMIT_NOFILE, (used + 4, used + 4))
        socks = [socket.socket(socket.AF_UNIX) for _ in range(12)]
        for sock in socks:
            sock.connect(str(daemon.socket))
        wait_until(lambda: "cannot accept a client" in daemon.log_text(), "it ran out")
        for sock in socks:
            sock.close()
        assert daemon.status()["metrics"]["connections"] >= 1  # it serves again
        assert daemon.log_text().count("cannot accept a client") < 20
        assert "ulimit -n" in daemon.log_text()
    finally:
        daemon.clean_up()


def test_out_of_descriptors_in_the_middle_of_a_hello_leaves_nothing_behind() -> None:
    """Each failed HELLO left a client that never came, and after 256 nobody was served any more."""
    daemon = DaemonProcess()
    try:
        daemon.start()
        assert daemon.popen is not None
        pid, pidfd, refused = daemon.popen.pid, os.pidfd_open(os.getpid()), 0
        open_files = Path(f"/proc/{pid}/fd")
        before = wait_until(lambda: len(list(open_files.iterdir())), "it has some")
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        for spare in range(1, 10):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (before + spare, most))
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(str(daemon.socket))
                with contextlib.suppress(OSError, AssertionError):
                    refused += ask(sock, Message.HELLO, hello(), pidfd).kind == Kind.ERROR
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
            wait_until(lambda: daemon.metrics()["connections"] == 1, "the connection is gone")
            assert daemon.metrics()["clients"] == 0, spare
            assert list(daemon.arena.glob("*.ledger")) == [], spare
            wait_until(lambda: len(list(open_files.iterdir())) <= before, "its files are closed")
        os.close(pidfd)
        assert refused > 0, "some failed half way"
    finally:
        daemon.clean_up()


def test_the_most_connections_are_served_and_one_more_refused() -> None:
    daemon = DaemonProcess()
    try:
        daemon.start()
        connections = []
        for _ in range(512):
            connections.append(ClientConnection.open(daemon.socket, timeout_s=20))
            connections[-1].observe()  # the queue of those not yet accepted is short
        extra = ClientConnection.open(daemon.socket, timeout_s=20)
        with pytest.raises(RefusedError, match="at most 512 connections"):
            extra.observe()
        for connection in [*connections, extra]:
            connection.close()
        assert daemon.metrics()["connections"] == 1
    finally:
        daemon.clean_up()
