"""Cache events over real ZMQ sockets: order, a gap after a loss, and snapshots that are exact."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvd.events import (
    HEARTBEAT_INTERVAL_S,
    KEYS_PER_FRAME_MAX,
    REPLAY_LOST,
    SNAPSHOT_END,
    ClassName,
    EventPublisher,
)
from kvd.replay import ReplayWindow
from kvd.store import StoreEvent

NAMES = [ClassName("aa" * 16, 0, "first"), ClassName("bb" * 16, 3, "second")]
TIMEOUT_S = 10


def keys_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


class Source:
    """A publisher whose cache is a set of (class, key) held here, as the daemon's is in its store."""

    def __init__(self, folder: Path) -> None:
        self.present: dict[tuple[int, bytes], None] = {}
        self.pending: list[StoreEvent] = []
        self.publisher = EventPublisher(
            "cd" * 16, folder / "pub", folder / "snapshot", NAMES.__getitem__, self.snapshot
        )

    def change(self, class_id: int, is_removed: bool, *numbers: int) -> None:
        """Becomes true now, is announced at the next flush."""
        for number in numbers:
            if is_removed:
                del self.present[class_id, keys_of(number)]
            else:
                self.present[class_id, keys_of(number)] = None
        self.pending.append(StoreEvent(class_id, is_removed, keys_of(*numbers)))

    def flush(self, *, some_were_lost: bool = False) -> None:
        events, self.pending = self.pending, []
        self.publisher.publish(events, some_were_lost=some_were_lost)

    def snapshot(self) -> list[StoreEvent]:
        self.flush()
        return [StoreEvent(class_id, False, key) for class_id, key in self.present]


class Listener:
    """What a router keeps."""

    def __init__(self, source: Source) -> None:
        self.context = zmq.asyncio.Context()
        self.source = source
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"kvd@")
        self.live.connect(source.publisher.publish_endpoint)
        self.asker = self.context.socket(zmq.DEALER)
        self.asker.connect(source.publisher.snapshot_endpoint)

    async def next_frame(self) -> tuple[int, list[dict[str, Any]]]:
        topic, sequence, payload = await asyncio.wait_for(self.live.recv_multipart(), TIMEOUT_S)
        assert topic == b"kvd@" + b"cd" * 16
        return int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)["events"]

    async def ask(self) -> tuple[int, set[tuple[str, bytes]]]:
        """A snapshot: the sequence number it is exact at, and what was present."""
        await self.asker.send_multipart([b"", b"snapshot"])
        exact_at, found = -1, set()
        while True:
            _, topic, sequence, payload = await asyncio.wait_for(self.asker.recv_multipart(), TIMEOUT_S)
            assert topic == b"kvd@" + b"cd" * 16
            if sequence == SNAPSHOT_END:
                return exact_at, found
            exact_at = int.from_bytes(sequence, "big")
            for event in msgspec.msgpack.decode(payload)["events"]:
                assert event["type"] == "stored"
                assert len(event["keys"]) <= KEYS_PER_FRAME_MAX * 16
                found |= named(event)

    async def replay(self, start: int) -> tuple[list[tuple[int, list[dict[str, Any]]]], bytes]:
        """Frames from a number on, and what the end marker says."""
        await self.asker.send_multipart([b"", b"replay", start.to_bytes(8, "big")])
        frames = []
        while True:
            _, topic, sequence, payload = await asyncio.wait_for(self.asker.recv_multipart(), TIMEOUT_S)
            assert topic == b"kvd@" + b"cd" * 16
            if sequence == SNAPSHOT_END:
                return frames, payload
            frames.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)["events"]))

    async def until_subscribed(self) -> None:
        """A subscription takes a moment; publish until one arrives."""
        while True:
            self.source.publisher.publish([StoreEvent(0, False, keys_of(10**6))], some_were_lost=False)
            if await self.live.poll(50):
                while await self.live.poll(50):
                    await self.live.recv_multipart()
                return

    def close(self) -> None:
        self.context.destroy(0)


def named(event: dict[str, Any]) -> set[tuple[str, bytes]]:
    return {(event["namespace"], event["keys"][i : i + 16]) for i in range(0, len(event["keys"]), 16)}


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        made = Source(Path(folder))
        yield made
        await made.publisher.close()
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
async def listener(source: Source) -> AsyncIterator[Listener]:
    made = Listener(source)
    await made.until_subscribed()
    yield made
    made.close()


async def test_events_arrive_in_order_and_say_what_they_are_of(source: Source, listener: Listener) -> None:
    source.change(0, False, 1, 2)
    source.change(1, False, 3)
    source.change(0, True, 1)
    source.flush()
    first, events = await listener.next_frame()
    assert [(event["type"], event["namespace"], event["model"], event["group"]) for event in events] == [
        ("stored", "aa" * 16, "first", 0),
        ("stored", "bb" * 16, "second", 3),
        ("removed", "aa" * 16, "first", 0),
    ]
    assert [event["keys"] for event in events] == [keys_of(1, 2), keys_of(3), keys_of(1)]
    assert {event["tier"] for event in events} == {"ram"}
    source.change(0, True, 2)
    source.flush()
    second, _ = await listener.next_frame()
    assert second == first + 1


async def test_nothing_to_say_sends_nothing(source: Source, listener: Listener) -> None:
    before = source.publisher.sequence
    source.flush()
    assert source.publisher.sequence == before


async def test_a_loss_leaves_a_gap_even_without_events(source: Source, listener: Listener) -> None:
    """dynamo#11984: a listener must be able to tell that it misses something."""
    source.change(0, False, 1)
    source.flush()
    before, _ = await listener.next_frame()
    source.flush(some_were_lost=True)
    after, events = await listener.next_frame()
    assert after == before + 2
    assert events == []


async def test_many_keys_are_cut_into_frames(source: Source, listener: Listener) -> None:
    numbers = list(range(KEYS_PER_FRAME_MAX * 2 + 5))
    source.change(0, False, *numbers)
    source.change(0, True, 3)
    source.flush()
    got: list[bytes] = []
    sequences = []
    for _ in range(3):
        sequence, events = await listener.next_frame()
        sequences.append(sequence)
        assert sum(len(event["keys"]) for event in events) <= KEYS_PER_FRAME_MAX * 16
        got += [event["type"].encode() + event["keys"] for event in events]
    assert b"".join(part.removeprefix(b"stored") for part in got[:-1]) == keys_of(*numbers)
    assert got[-1] == b"removed" + keys_of(3)
    assert sequences == [sequences[0], sequences[0] + 1, sequences[0] + 2]


async def test_a_snapshot_before_the_first_event_is_empty(source: Source) -> None:
    asker = Listener(source)
    assert await asker.ask() == (0, set())
    asker.close()


async def test_a_snapshot_of_an_emptied_cache_says_what_it_is_exact_at(source: Source, listener: Listener) -> None:
    source.change(0, False, 1)
    source.change(0, True, 1)
    assert await listener.ask() == (source.publisher.sequence - 1, set())


async def test_a_snapshot_publishes_what_was_pending_first(source: Source, listener: Listener) -> None:
    source.change(0, False, 1, 2)
    exact_at, found = await listener.ask()
    sequence, events = await listener.next_frame()
    assert sequence == exact_at
    assert found == named(events[0])


async def test_snapshots_are_exact_while_traffic_goes_on(source: Source, listener: Listener) -> None:
    """Snapshot plus the events after it is the truth, whenever it was asked for."""
    stop = asyncio.Event()

    async def traffic() -> None:
        number = 0
        while not stop.is_set():
            source.change(number % 2, False, number, number + 1)
            if number > 40:
                source.change(number % 2, True, number - 40)
            if number % 6 == 0:
                source.flush()
                await asyncio.sleep(0.001)
            number += 2
        source.flush()
        source.change(0, False, 10**9)
        source.flush()

    task = asyncio.get_running_loop().create_task(traffic())
    for _ in range(4):
        await asyncio.sleep(0.02)
        exact_at, known = await listener.ask()
    stop.set()
    await task
    while True:
        sequence, events = await listener.next_frame()
        for event in events if sequence > exact_at else []:
            known = known - named(event) if event["type"] == "removed" else known | named(event)
        if sequence == source.publisher.sequence - 1:
            break
    assert known == {(NAMES[class_id].namespace, key) for class_id, key in source.present}


async def test_a_subscriber_that_does_not_read_stops_nobody(source: Source, listener: Listener) -> None:
    """vllm#53859: a full queue blocked the engine."""
    for number in range(20_000):
        source.change(0, False, number)
        source.flush()
    assert source.publisher.sequence > 20_000
    last = 0
    gap = False
    while await listener.live.poll(200):
        sequence, _ = await listener.next_frame()
        gap |= last != 0 and sequence != last + 1
        last = sequence
    # What was lost came last and nothing follows it: the heartbeat shows the gap.
    source.publisher._last_sent_s -= HEARTBEAT_INTERVAL_S
    source.publisher.beat()
    sequence, events = await listener.next_frame()
    assert events == []
    assert sequence == source.publisher.sequence - 1
    assert gap or sequence > last + 1


async def test_heartbeats_come_only_in_silence(source: Source, listener: Listener) -> None:
    source.change(0, False, 1)
    source.flush()
    before = source.publisher.sequence
    source.publisher.beat()
    assert source.publisher.sequence == before


@pytest.mark.parametrize("question", [[b""], [b"", b"other"], [b"snapshot"], [b"", b"snapshot", b"more"]])
async def test_nonsense_on_the_snapshot_socket_is_ignored(source: Source, question: list[bytes]) -> None:
    asker = Listener(source)
    await asker.asker.send_multipart(question)
    assert (await asker.ask())[1] == set()
    asker.close()


async def test_a_replay_is_what_was_published(source: Source, listener: Listener) -> None:
    published = []
    for number in range(5):
        source.change(0, False, number)
        source.flush()
        published.append(await listener.next_frame())
    assert await listener.replay(published[0][0]) == (published, b"")
    assert await listener.replay(published[3][0]) == (published[3:], b"")


async def test_a_replay_of_nothing_missed_is_empty(source: Source, listener: Listener) -> None:
    assert await listener.replay(source.publisher.sequence) == ([], b"")


@pytest.mark.parametrize("start", [0, 2**64 - 1])
async def test_a_replay_of_what_never_was_says_it_is_lost(source: Source, listener: Listener, start: int) -> None:
    assert await listener.replay(start) == ([], REPLAY_LOST)


async def test_a_replay_across_lost_events_says_it_is_lost(source: Source, listener: Listener) -> None:
    source.change(0, False, 1)
    source.flush()
    before, _ = await listener.next_frame()
    source.flush(some_were_lost=True)
    after, _ = await listener.next_frame()
    assert await listener.replay(before) == ([], REPLAY_LOST)
    assert await listener.replay(after) == ([(after, [])], b"")


async def test_a_replay_further_back_than_the_window_says_it_is_lost(source: Source, listener: Listener) -> None:
    source.publisher._window = ReplayWindow(frames_max=3)
    first = source.publisher.sequence
    for number in range(5):
        source.change(0, False, number)
        source.flush()
    assert (await listener.replay(first))[1] == REPLAY_LOST
    frames, end = await listener.replay(first + 2)
    assert [sequence for sequence, _ in frames] == [first + 2, first + 3, first + 4]
    assert end == b""


@pytest.mark.parametrize("question", [[b"", b"replay"], [b"", b"replay", b"123"], [b"", b"replay", b"12345678", b""]])
async def test_nonsense_for_a_replay_is_ignored(source: Source, listener: Listener, question: list[bytes]) -> None:
    await listener.asker.send_multipart(question)
    assert await listener.replay(source.publisher.sequence) == ([], b"")


async def test_a_failing_snapshot_does_not_end_the_service(source: Source) -> None:
    asker = Listener(source)
    source.present[7, keys_of(1)] = None  # a class nobody knows
    await asker.asker.send_multipart([b"", b"snapshot"])
    assert not await asker.asker.poll(200)
    del source.present[7, keys_of(1)]
    assert await asker.ask() == (0, set())
    asker.close()


async def test_sockets_are_for_this_user_only(source: Source) -> None:
    for endpoint in (source.publisher.publish_endpoint, source.publisher.snapshot_endpoint):
        assert Path(endpoint.removeprefix("ipc://")).stat().st_mode & 0o077 == 0


async def test_publishing_after_the_end_is_harmless(source: Source) -> None:
    await source.publisher.close()
    source.change(0, False, 1)
    source.flush()
