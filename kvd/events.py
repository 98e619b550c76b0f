"""Cache events over ZMQ: every change in order, and a snapshot for whoever is late or lagging.

PUB frames: topic `kvd@<instance>`, sequence number (8 bytes, big-endian), msgpack payload
`{"ts": seconds, "events": [...]}`. An event is `{"type": "stored" | "removed", "tier": "ram",
"namespace": hex, "model": name, "group": int, "keys": n times 16 bytes}`. A subscriber that sees a
gap in the sequence asks the snapshot socket, either for all that is present (`snapshot`) or, when it missed a
little, for the frames from a number on (`replay`, see `kvd/replay.py`). A slow subscriber loses frames, never slows
the daemon; a frame without events follows within two seconds of the last one, so that a loss at the end is seen too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvd.replay import ReplayWindow
from kvd.store import KEY_BYTES, StoreEvent

SEND_QUEUE_FRAMES = 4096
"""Frames kept for one slow subscriber before it starts to lose some."""
SNAPSHOT_QUEUE_FRAMES = 65536
KEYS_PER_FRAME_MAX = 4096
HEARTBEAT_INTERVAL_S = 1.0
SNAPSHOT_END = (2**64 - 1).to_bytes(8, "big")
REPLAY_LOST = b"lost"
"""Payload of a replay's end marker when the frames asked for are no longer kept."""

log = logging.getLogger("kvd")


@dataclass(frozen=True)
class ClassName:
    """What a class id stands for."""

    namespace: str
    group: int
    model: str


class EventPublisher:
    """Publishes store events and answers snapshot requests.

    `names` resolves class ids; `snapshot` publishes what is pending and returns all present records.
    """

    def __init__(
        self,
        instance: str,
        publish_path: Path,
        snapshot_path: Path,
        names: Callable[[int], ClassName],
        snapshot: Callable[[], list[StoreEvent]],
        *,
        first_sequence: int = 1,
    ) -> None:
        self.publish_endpoint = f"ipc://{publish_path}"
        self.snapshot_endpoint = f"ipc://{snapshot_path}"
        self.sequence = first_sequence  # of the next frame; a snapshot taken before the first is exact at one less
        self.snapshots_total = 0
        self.replays_total = 0
        self._window = ReplayWindow()
        self._last_sent_s = time.monotonic()
        self._topic = f"kvd@{instance}".encode()
        self._names = names
        self._snapshot = snapshot
        self._paths = (publish_path, snapshot_path)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        plain = zmq.Context(self._context)
        self._publisher = plain.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, SNAPSHOT_QUEUE_FRAMES)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1024)
        self._router.setsockopt(zmq.LINGER, 0)
        mask = os.umask(0o177)  # sockets are for this user only
        try:
            self._publisher.bind(self.publish_endpoint)
            self._router.bind(self.snapshot_endpoint)
        finally:
            os.umask(mask)
        self._server = asyncio.get_running_loop().create_task(self._serve_questions())

    def publish(self, events: list[StoreEvent], *, some_were_lost: bool) -> None:
        """Send events in order; after a loss, leave a gap that makes every subscriber resynchronise."""
        if self._publisher.closed:
            return
        if some_were_lost:
            log.warning("event queue overflowed; subscribers will resynchronise from a snapshot")
            self.sequence += 1
        if not events and not some_were_lost:
            return
        for batch in _batches(events) or [[]]:
            self._send(batch)

    def beat(self) -> None:
        """Send an empty frame when nothing was sent for a while. To be called often."""
        if not self._publisher.closed and time.monotonic() - self._last_sent_s >= HEARTBEAT_INTERVAL_S:
            self._send([])

    def _send(self, batch: list[StoreEvent]) -> None:
        payload = self._encode(batch)
        self._publisher.send_multipart([self._topic, self.sequence.to_bytes(8, "big"), payload])
        self._window.add(self.sequence, payload)
        self.sequence += 1
        self._last_sent_s = time.monotonic()

    def _encode(self, events: list[StoreEvent]) -> bytes:
        encoded = []
        for event in events:
            name = self._names(event.class_id)
            encoded.append(
                {
                    "type": "removed" if event.is_removed else "stored",
                    "tier": "ram",
                    "namespace": name.namespace,
                    "model": name.model,
                    "group": name.group,
                    "keys": event.keys,
                }
            )
        return self._encoder.encode({"ts": time.time(), "events": encoded})

    async def _serve_questions(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            try:
                match frames:
                    case [peer, _, b"snapshot"]:
                        await self._send_snapshot(peer)
                    case [peer, _, b"replay", start] if len(start) == 8:
                        await self._send_replay(peer, int.from_bytes(start, "big"))
            except Exception:
                log.exception("a snapshot or replay failed; its subscriber will ask again")

    async def _send_snapshot(self, peer: bytes) -> None:
        self.snapshots_total += 1
        # Taking the snapshot publishes what was pending; no event can come in between, because
        # this runs in one go on the daemon's only thread.
        # An empty cache sends a frame too: it says what the snapshot is exact at.
        payloads = [self._encode(batch) for batch in _batches(self._snapshot()) or [[]]]
        exact_at = (self.sequence - 1).to_bytes(8, "big")
        for payload in payloads:
            await self._router.send_multipart([peer, b"", self._topic, exact_at, payload])
        await self._router.send_multipart([peer, b"", self._topic, SNAPSHOT_END, b""])

    async def _send_replay(self, peer: bytes, start: int) -> None:
        """Send the frames from `start` on and an end marker; the marker alone, saying so, when some are gone."""
        self.replays_total += 1
        frames = self._window.since(start, self.sequence)
        for sequence, payload in frames or ():
            await self._router.send_multipart([peer, b"", self._topic, sequence.to_bytes(8, "big"), payload])
        end = REPLAY_LOST if frames is None else b""
        await self._router.send_multipart([peer, b"", self._topic, SNAPSHOT_END, end])

    async def close(self) -> None:
        """Stop serving and remove the sockets."""
        self._server.cancel()
        await asyncio.gather(self._server, return_exceptions=True)
        self._publisher.close(0)
        self._router.close(0)
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)


def _batches(events: list[StoreEvent]) -> list[list[StoreEvent]]:
    """Cut events into frames of at most KEYS_PER_FRAME_MAX keys, keeping their order."""
    batches: list[list[StoreEvent]] = []
    room = 0
    for event in events:
        step = KEYS_PER_FRAME_MAX * KEY_BYTES
        for start in range(0, len(event.keys), step):
            keys = event.keys[start : start + step]
            count = len(keys) // KEY_BYTES
            if count > room:
                batches.append([])
                room = KEYS_PER_FRAME_MAX
            batches[-1].append(StoreEvent(event.class_id, event.is_removed, keys))
            room -= count
    return batches
