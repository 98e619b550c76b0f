"""The hot thread over real sockets: every frame answered, every limit met, nothing believed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from infera_core import ffi, lib

from kvd import protocol
from kvd.client.arena import PutFacts
from kvd.client.copier import CpuCopier, Segment
from kvd.loop import Loop, Notice
from kvd.protocol import FRAME_BYTES_MAX, HEADER, Frame, FrameReader, Kind, Message, encode
from tests.support.processes import wait_until
from tests.support.store_model import Client, StoreModel
from tests.support.store_model import Kind as RecordKind

RECORD_BYTES = 4096
TIMEOUT_S = 10.0
RING_HEAD_OFFSET = 128
"""Of `ring_head` in a ledger, see docs/kvd-arena.md."""


class Rig:
    """A store with its thread, and one client with a connection."""

    def __init__(self) -> None:
        self.model = StoreModel(data_bytes=1 << 20, records=1024)
        self.kind: RecordKind = self.model.open_class((RECORD_BYTES,))
        self.client: Client = self.model.attach()
        self.loop = Loop(self.model.store.handle, reservation_s=30.0, incomplete_s=30.0)
        self.model.store.guard = self.loop
        self.client.arena._doorbell = os.dup(self.loop.doorbell)
        self.now_ns = time.monotonic_ns() + 3600 * 10**9
        """Later than the thread's own clock will be: see `expire`."""
        self.socket, self.name = self.connect()
        self.reader = FrameReader()

    def connect(self, received: bytes = b"") -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        return ours, self.loop.add(theirs.detach(), self.client.number, received)

    def read(self) -> Frame | None:
        """The next frame; None when the other side has closed."""
        while (frame := self.reader.next_frame()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self.reader.feed(data)
        return frame

    def wait_notice(self) -> Notice:
        poller = select.poll()
        poller.register(self.loop.notice_descriptor, select.POLLIN)
        assert poller.poll(TIMEOUT_S * 1000)
        return next(iter(self.loop.notices()))

    def want_stock(self, count: int) -> None:
        with self.loop:
            assert self.loop.want_stock(self.client.number, self.kind.class_id, 0, count)

    def put(self, keys: list[bytes], content: int = 0x5A) -> int:
        """Save through the ring."""
        block = ctypes.create_string_buffer(bytes([content]) * RECORD_BYTES, RECORD_BYTES)
        copier = CpuCopier([Segment(ctypes.addressof(block), 0, RECORD_BYTES)])
        facts = PutFacts(self.kind.class_id, 0, copier.segments)
        return self.client.arena.put(facts, b"".join(keys), [1] * len(keys), [0] * len(keys))

    def present(self, keys: list[bytes]) -> int:
        return sum(self.client.arena.present(self.kind.class_id, 1, b"".join(keys)))

    def close(self) -> None:
        self.socket.close()
        with self.loop:
            for client in list(self.model.clients.values()):
                self.loop.drain_client(client.number)
        assert self.model.store.audit() is None
        self.loop.stop()
        self.model.store.guard = contextlib.nullcontext()
        self.model.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def reserve(rig: Rig, numbers: list[int], request_id: int = 1) -> bytes:
    head = protocol.RESERVE_HEAD.pack(*reserve_head(rig))
    wishes = b"".join(protocol.WISH.pack(key(number), 1, 0) for number in numbers)
    return encode(Message.RESERVE, Kind.REQUEST, request_id, head + wishes)


def reserve_head(rig: Rig) -> list[int]:
    fields = len(protocol.RESERVE_HEAD.unpack(bytes(protocol.RESERVE_HEAD.size)))
    return [rig.kind.class_id, 0, lib.STORE_RETAIN_SHORT, *([0] * (fields - 3))]


def test_frames_in_pieces_of_every_size_are_answered_in_order(rig: Rig) -> None:
    stream = b"".join(reserve(rig, [number], number) for number in range(1, 5))
    for cut in range(1, 9):
        for start in range(0, len(stream), cut):
            rig.socket.sendall(stream[start : start + cut])
        assert [rig.read().request_id for _ in range(4)] == [1, 2, 3, 4]  # type: ignore[union-attr]


def test_reserve_commit_give_up_and_touch(rig: Rig) -> None:
    rig.socket.sendall(reserve(rig, [1, 2, 3]))
    answer = rig.read()
    assert answer is not None
    grants = list(protocol.GRANT.iter_unpack(answer.payload))
    assert [status for _, _, status, _ in grants] == [lib.STORE_OK] * 3
    commits = b"".join(protocol.COMMITMENT.pack(name, 0) for name, _, _, _ in grants[:2])
    rig.socket.sendall(encode(Message.COMMIT, Kind.REQUEST, 2, commits))
    assert rig.read().payload == bytes(8)  # type: ignore[union-attr]
    rig.socket.sendall(encode(Message.GIVE_UP, Kind.REQUEST, 3, grants[2][0].to_bytes(8, "little")))
    assert rig.read().kind == Kind.ANSWER  # type: ignore[union-attr]
    touch = protocol.TOUCH_HEAD.pack(rig.kind.class_id) + key(1) + key(2)
    rig.socket.sendall(encode(Message.TOUCH, Kind.REQUEST, 4, touch))
    assert rig.read().kind == Kind.ANSWER  # type: ignore[union-attr]
    stats = rig.model.store.stats()
    assert (stats["records_present"], stats["reservations"], stats["touched_total"]) == (2, 0, 2)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (HEADER.pack(0, 3, 0, 1, 0x12345678), b"magic"),
        (HEADER.pack(FRAME_BYTES_MAX + 1, 3, 0, 1, protocol.MAGIC), b"1 MiB"),
        (HEADER.pack(0, 3, 1, 1, protocol.MAGIC), b"requests only"),
    ],
)
def test_what_is_not_a_request_is_refused_in_words_and_closed(rig: Rig, header: bytes, words: bytes) -> None:
    rig.socket.sendall(header)
    frame = rig.read()
    assert frame is not None
    assert frame.kind == Kind.ERROR
    assert words in frame.payload
    assert rig.read() is None
    assert rig.wait_notice() == Notice(rig.name, is_malformed=True)


@pytest.mark.parametrize("message", [Message.RESERVE, Message.COMMIT, Message.GIVE_UP, Message.TOUCH])
@pytest.mark.parametrize("payload", [b"", b"x", b"x" * 23, b"x" * 100_001])
def test_malformed_batches_are_refused_and_the_connection_goes_on(rig: Rig, message: Message, payload: bytes) -> None:
    rig.socket.sendall(encode(message, Kind.REQUEST, 7, payload))
    frame = rig.read()
    assert frame is not None
    assert (frame.kind, frame.request_id) == (Kind.ERROR, 7)
    rig.socket.sendall(reserve(rig, [1], 8))
    assert rig.read().request_id == 8  # type: ignore[union-attr]


def test_largest_frame_is_taken_whole(rig: Rig) -> None:
    batch = encode(Message.GIVE_UP, Kind.REQUEST, 1, bytes(8 * protocol.BATCH_MAX))
    rig.socket.sendall(batch + encode(Message.STATUS, Kind.REQUEST, 2, b"x" * FRAME_BYTES_MAX))
    assert rig.read().kind == Kind.ANSWER  # type: ignore[union-attr]
    frame = rig.read()
    assert frame is not None
    assert b"64 KiB" in frame.payload, "Python is not handed that much"


def test_other_messages_go_to_python_and_its_answer_comes_back(rig: Rig) -> None:
    rig.socket.sendall(encode(Message.OPEN, Kind.REQUEST, 5, b"{}"))
    assert rig.wait_notice() == Notice(rig.name, Message.OPEN, 5, b"{}")
    rig.loop.send(rig.name, encode(Message.OPEN, Kind.ANSWER, 5, b"fine"))
    assert rig.read().payload == b"fine"  # type: ignore[union-attr]


def test_python_that_does_not_keep_up_is_not_buried(rig: Rig) -> None:
    for number in range(2 * lib.LOOP_REQUESTS_MAX):
        rig.socket.sendall(encode(Message.STATUS, Kind.REQUEST, number, b""))
    refused = [rig.read() for _ in range(lib.LOOP_REQUESTS_MAX)]
    assert all(frame is not None and b"busy" in frame.payload for frame in refused)
    assert len(list(rig.loop.notices())) == lib.LOOP_REQUESTS_MAX


def test_peer_that_does_not_read_is_shown_out(rig: Rig) -> None:
    frame = encode(Message.STATUS, Kind.ANSWER, 1, bytes(1 << 19))
    for _ in range(2 * lib.LOOP_UNSENT_BYTES_MAX // len(frame)):
        rig.loop.send(rig.name, frame)
    assert rig.wait_notice() == Notice(rig.name)


def test_end_of_a_connection_is_told_once_and_its_name_is_not_used_again(rig: Rig) -> None:
    rig.socket.close()
    assert rig.wait_notice() == Notice(rig.name)
    assert list(rig.loop.notices()) == []
    rig.loop.send(rig.name, b"to nobody")
    rig.loop.close_connection(rig.name)
    _, again = rig.connect()
    assert again not in (0, rig.name)


def test_what_was_read_before_the_hand_over_is_answered(rig: Rig) -> None:
    stream = reserve(rig, [1], 1) + reserve(rig, [2], 2)
    rig.socket, _ = rig.connect(stream[:100])
    rig.socket.sendall(stream[100:])
    assert [rig.read().request_id for _ in range(2)] == [1, 2]  # type: ignore[union-attr]


def test_connections_are_limited(rig: Rig) -> None:
    held = [rig.connect() for _ in range(lib.LOOP_CONNECTIONS_MAX - 1)]
    assert all(name for _, name in held)
    refused, name = rig.connect()
    assert name == 0
    assert refused.recv(1) == b""
    for sock, _ in held:
        sock.close()


# ---- ring and stock ----


def test_saves_without_a_word_on_the_socket(rig: Rig) -> None:
    rig.want_stock(8)
    keys = [key(number) for number in range(8)]
    assert rig.put(keys) == 8
    wait_until(lambda: rig.present(keys) == 8, "the ring is drained")
    assert rig.loop.stats()["frames_total"] == 0


def test_stock_is_refilled_and_never_more_than_its_share(rig: Rig) -> None:
    rig.want_stock(64)
    share = (1 << 20) // lib.STORE_STOCK_SHARE
    assert 0 < rig.model.store.stats()["stock_bytes"] <= share
    saved = 0
    for number in range(600):
        saved += wait_until(lambda number=number: rig.put([key(number)]), "stock is refilled")
    assert saved == 600
    wait_until(lambda: rig.present([key(599)]) == 1, "the last is there")
    assert rig.model.store.stats()["evicted_total"] > 0
    assert rig.model.store.stats()["stock_bytes"] <= share


def test_without_stock_nothing_is_saved_and_nothing_hangs(rig: Rig) -> None:
    assert rig.put([key(1)]) == 0


def test_two_savers_of_one_key_keep_one_copy(rig: Rig) -> None:
    rig.want_stock(8)
    assert rig.put([key(1)] * 4) == 4
    wait_until(lambda: rig.model.store.stats()["duplicates_total"] == 3, "three copies are given back")
    assert rig.model.store.stats()["records_present"] == 1


def test_socket_message_sees_what_the_ring_said_before(rig: Rig) -> None:
    rig.want_stock(8)
    for number in range(300):
        wait_until(lambda number=number: rig.put([key(number)]), "stock is refilled")
        rig.socket.sendall(reserve(rig, [number]))
        answer = rig.read()
        assert answer is not None
        assert [status for _, _, status, _ in protocol.GRANT.iter_unpack(answer.payload)] == [lib.STORE_EXISTS]


def test_client_that_wrote_over_its_ring_hurts_only_itself(rig: Rig) -> None:
    rig.want_stock(8)
    assert rig.put([key(1)]) == 1
    wait_until(lambda: rig.present([key(1)]) == 1, "the ring is drained")
    ledger = rig.client.arena._ledger
    ledger[RING_HEAD_OFFSET : RING_HEAD_OFFSET + 8] = (2**63).to_bytes(8, "little")
    rig.socket.sendall(reserve(rig, [2]))
    assert rig.read() is not None
    assert rig.loop.stats()["ring_broken_total"] == 1
    other = rig.model.attach()
    assert rig.model.store.audit() is None
    assert other.number != rig.client.number


def test_death_of_a_client_returns_its_stock(rig: Rig) -> None:
    rig.want_stock(16)
    assert rig.put([key(1)]) == 1
    with rig.loop:
        rig.loop.drain_client(rig.client.number)
        rig.model.store.detach(rig.client.number)
        del rig.model.clients[rig.client.number]
    stats = rig.model.store.stats()
    assert (stats["stock_bytes"], stats["reservations"]) == (0, 0)
    assert stats["records_present"] == 1, "what it left in its ring was taken in first"


# ---- stock that a live client took and forgot ----

STATE_READY, STATE_EMPTY = 1, 0
STOCK_AT = 256 + 8192 * 24
"""Of the first row of stock in a ledger, see docs/kvd-arena.md."""
PERIOD_NS = 1_000_000
RING_ENTRIES = 4096


def take_stock(rig: Rig, count: int) -> list[tuple[int, int]]:
    """Do what a client does that takes stock and then forgets it; reservations and offsets."""
    ledger, taken = rig.client.arena._ledger, []
    for at in range(STOCK_AT, STOCK_AT + 256 * 32, 32):
        state, _, reservation, offset = struct.unpack_from("<QQQQ", ledger, at)
        if state & 0xFFFFFFFF == STATE_READY and len(taken) < count:
            struct.pack_into("<Q", ledger, at, state >> 32 << 32 | STATE_EMPTY)
            taken.append((reservation, offset))
    assert len(taken) == count
    return taken


def expire(rig: Rig, periods: int) -> None:
    """Let time pass."""
    for _ in range(periods):
        rig.now_ns += 2 * PERIOD_NS
        rig.model.store.expire(rig.now_ns, PERIOD_NS)


def test_stock_that_was_taken_and_forgotten_is_quarantined_and_does_not_use_up_the_stock(rig: Rig) -> None:
    rig.want_stock(8)
    take_stock(rig, 5)
    expire(rig, 1)
    stats = rig.model.store.stats()
    assert (stats["stock_overdue_total"], stats["quarantined_bytes"]) == (0, 0), "it may be being written"
    expire(rig, 1)
    stats = rig.model.store.stats()
    assert (stats["stock_overdue_total"], stats["quarantined_bytes"]) == (5, 5 * RECORD_BYTES)
    assert (stats["stock_extents"], stats["stock_bytes"]) == (3, 3 * RECORD_BYTES)
    assert rig.model.store.audit() is None
    expire(rig, 5)
    assert rig.model.store.stats()["stock_extents"] == 3, "what is still on offer is not forgotten"


def test_overdue_stock_that_is_committed_after_all_still_counts(rig: Rig) -> None:
    """Its space was nobody else's meanwhile, so the bytes are right: a client that was stopped goes on."""
    rig.want_stock(4)
    ((reservation, _),) = take_stock(rig, 1)
    expire(rig, 4)
    assert rig.model.store.stats()["stock_overdue_total"] == 1
    wish = ffi.new("store_late_wish *", {"retention": lib.STORE_RETAIN_SHORT})
    ffi.memmove(wish.wish.key, key(1), 16)
    with rig.loop:
        status = lib.store_commit_stock(rig.model.store.handle, rig.client.number, reservation, wish, 1)
    assert status == lib.STORE_OK
    assert rig.present([key(1)]) == 1
    stats = rig.model.store.stats()
    assert (stats["quarantined_bytes"], stats["records_present"]) == (0, 1)
    assert rig.model.store.audit() is None


def test_overdue_stock_comes_back_when_its_client_gives_it_up_or_ends(rig: Rig) -> None:
    rig.want_stock(8)
    taken = take_stock(rig, 6)
    expire(rig, 4)
    rig.model.store.give_up(rig.client.number, taken[0][0].to_bytes(8, "little"))
    assert rig.model.store.stats()["quarantined_bytes"] == 5 * RECORD_BYTES
    with rig.loop:
        rig.loop.drain_client(rig.client.number)
        rig.model.store.detach(rig.client.number)
        del rig.model.clients[rig.client.number]
    stats = rig.model.store.stats()
    assert (stats["quarantined_bytes"], stats["used_bytes"], stats["reservations"]) == (0, 0, 0)


def test_a_client_that_forgets_again_and_again_gets_no_more_stock(rig: Rig) -> None:
    forgotten = 0
    for _ in range(40):
        rig.want_stock(8)
        ready = rig.model.store.stats()["stock_extents"]
        if not ready:
            break
        take_stock(rig, ready)
        forgotten += ready
        expire(rig, 4)
    assert lib.STORE_STOCK_OVERDUE_MAX <= forgotten < lib.STORE_STOCK_OVERDUE_MAX + 8
    assert rig.model.store.stats()["quarantined_bytes"] == forgotten * RECORD_BYTES
    rig.socket.sendall(reserve(rig, [1]))
    answer = rig.read()
    assert answer is not None
    assert protocol.GRANT.unpack(answer.payload)[2] == lib.STORE_OK, "it can still save by asking"
    assert rig.model.store.audit() is None


# ---- touches ----


def test_touches_leave_half_of_the_ring_to_saves(rig: Rig) -> None:
    """A prompt of 131k tokens is 8,192 records: telling of all of them filled the ring, and saves had to wait."""
    rig.want_stock(8)
    keys = b"".join(key(number) for number in range(8192))
    with rig.loop:  # the thread does not drain meanwhile
        told = sum(rig.client.arena.touch(rig.kind.class_id, keys) for _ in range(4))
        assert told == RING_ENTRIES // 2
        assert rig.put([key(1)]) == 1
    wait_until(lambda: rig.present([key(1)]) == 1, "the ring is drained")


def test_touches_of_a_long_chain_come_round_to_all_of_it(rig: Rig) -> None:
    keys = b"".join(key(number) for number in range(1000))
    told: set[bytes] = set()
    for _ in range(4):
        with rig.loop:
            ledger = rig.client.arena._ledger
            head = int.from_bytes(ledger[RING_HEAD_OFFSET : RING_HEAD_OFFSET + 8], "little")
            count = rig.client.arena.touch(rig.kind.class_id, keys, 256, rings=False)
            assert 0 < count <= 256
            entries = [ring_at(number % RING_ENTRIES) for number in range(head, head + count)]
            told |= {bytes(ledger[at + 16 : at + 32]) for at in entries}
        wait_until(lambda: not has_entries(rig), "the ring is drained")
    assert told == {key(number) for number in range(1000)}


def has_entries(rig: Rig) -> bool:
    """Whether the daemon has something left to read."""
    head, tail = (rig.client.arena._ledger[at : at + 8] for at in (RING_HEAD_OFFSET, RING_HEAD_OFFSET + 64))
    return head != tail


def ring_at(entry: int) -> int:
    """Offset of a ring entry in a ledger."""
    return STOCK_AT + 256 * 32 + entry * 64


def test_touches_without_a_bell_arrive_all_the_same(rig: Rig) -> None:
    rig.want_stock(2)
    assert rig.put([key(1)]) == 1
    wait_until(lambda: rig.present([key(1)]) == 1, "it is stored")
    assert rig.client.arena.touch(rig.kind.class_id, key(1), rings=False) == 1
    wait_until(lambda: rig.model.store.stats()["touched_total"] == 1, "the daemon looked")


def test_no_end_of_a_connection_is_lost_while_python_is_busy(rig: Rig) -> None:
    """Each lost one would count against the limit on connections for ever."""
    opened = [rig.connect() for _ in range(lib.LOOP_CONNECTIONS_MAX - 1)]
    for number in range(2 * lib.LOOP_REQUESTS_MAX):
        rig.socket.sendall(encode(Message.STATUS, Kind.REQUEST, number, b""))
    for _ in range(lib.LOOP_REQUESTS_MAX):
        rig.read()  # refused: Python has as many as it may have waiting
    for sock, _ in opened:
        sock.close()
    ended: set[int] = set()

    def take() -> bool:
        ended.update(notice.connection for notice in rig.loop.notices() if notice.payload is None)
        return len(ended) == len(opened)

    wait_until(lambda: rig.loop.stats()["notices_lost_total"] or all_closed(rig, len(opened)), "all ends are seen")
    assert rig.loop.stats()["notices_lost_total"] == 0
    wait_until(take, "all ends are told")


def all_closed(rig: Rig, count: int) -> bool:
    """Whether the thread has room for `count` connections again."""
    with contextlib.ExitStack() as stack:
        names = []
        for _ in range(count):
            sock, name = rig.connect()
            stack.enter_context(contextlib.closing(sock))
            names.append(name)
        for name in names:
            rig.loop.close_connection(name)
    return all(names)


def test_more_kinds_of_stock_than_a_client_may_have_are_counted(rig: Rig) -> None:
    with rig.loop:
        answers = [
            rig.loop.want_stock(rig.client.number, class_id, 0, 1) for class_id in range(lib.LOOP_STOCK_WISHES_MAX + 2)
        ]
    assert answers == [True] * lib.LOOP_STOCK_WISHES_MAX + [False] * 2
    assert rig.loop.stats()["stock_wishes_refused_total"] == 2
