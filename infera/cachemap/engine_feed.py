"""Follows one engine rank's events over ZMQ and keeps its index true.

Only the incarnation's own topic is subscribed to: ZMQ reconnects silently, and a restarted engine on the same
address must not pass for the old one. Live frames wait in the socket (its high-water mark is the limit) while a
replay runs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import zmq
import zmq.asyncio

from infera.cachemap.native_map import EngineDecoder, NativeCacheMap
from infera.cachemap.sequence import SequenceTracker, Step
from infera.cachemap.sockets import END_SEQUENCE, FRAMES_BEFORE_YIELD, dealer, read_sequence, subscriber
from infera.discovery.record import EventRank

REPLAY_ATTEMPTS_MAX: Final = 3
REPLAY_SILENCE_S_MAX: Final = 5.0
REPLAY_S_MAX: Final = 60.0
_log = logging.getLogger(__name__)


class EngineFeed:
    """One subscription. ``run`` goes on until it is cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        topic: str,
        rank: EventRank,
        decoder: EngineDecoder,
        cache_map: NativeCacheMap,
    ) -> None:
        self._context = context
        self._topic = topic.encode()
        self._rank = rank
        self._decoder = decoder
        self._map = cache_map
        self._tracker = SequenceTracker()
        self._frames = 0

    async def run(self) -> None:
        """Join with a replay from the beginning, then follow."""
        socket = subscriber(self._context, self._rank.pub, self._topic)
        try:
            await self._take(self._tracker.join())
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or frames[0] != self._topic:
                    self._count("other_topic")  # a subscription also matches longer topics
                    continue
                sequence = read_sequence(frames[1])
                if sequence is None:
                    self._count("bad_frame")
                    continue
                await self._take(self._tracker.live(sequence, frames[2]))
        finally:
            socket.close(0)

    async def _take(self, step: Step) -> None:
        self._apply(step)
        if step.replay_from is not None:
            await self._replay(step.replay_from)
        self._frames += 1
        if self._frames % FRAMES_BEFORE_YIELD == 0:
            await asyncio.sleep(0)

    def _apply(self, step: Step) -> None:
        self._count("duplicate", step.duplicates)
        self._count("gap", step.replay_from is not None and step.is_gap)
        if step.resync:
            self._count("resync")
            _log.warning("cachemap: events of %s were lost for good; its entries are dropped", self._topic.decode())
            self._decoder.reset()
        for payload in step.frames:
            if not self._decoder.apply(payload):
                # Like a lost frame: what it took away is not known.
                _log.warning("cachemap: unreadable event of %s; its entries are dropped", self._topic.decode())
                self._decoder.reset()

    def _count(self, counter: str, more: int = 1) -> None:
        if more:
            self._map.count("engine", counter, more)

    async def _replay(self, start: int) -> None:
        """Ask for what is missing; bounded tries, each with bounded silence. Always ends the tracker's replay."""
        self._count("replay")
        for _ in range(REPLAY_ATTEMPTS_MAX if self._rank.replay else 0):
            try:
                async with asyncio.timeout(REPLAY_S_MAX):
                    await self._replay_once(max(start, self._tracker.next_sequence))
                break
            except TimeoutError:
                self._count("replay_timeout")
        self._apply(self._tracker.replay_ended())

    async def _replay_once(self, start: int) -> None:
        socket = dealer(self._context, self._rank.replay or "")
        try:
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            count = 0
            while True:
                async with asyncio.timeout(REPLAY_SILENCE_S_MAX):
                    frames = await socket.recv_multipart()
                # The delimiter may be missing, depending on the engine's socket.
                frames = frames[1:] if frames and frames[0] == b"" else frames
                sequence = read_sequence(frames[-2]) if len(frames) >= 2 else None
                if sequence is None or sequence == END_SEQUENCE:
                    return
                if len(frames) == 3 and frames[0] != self._topic:
                    self._count("other_topic")
                    continue
                self._apply(self._tracker.replayed(sequence, frames[-1]))
                count += 1
                if count % FRAMES_BEFORE_YIELD == 0:
                    await asyncio.sleep(0)
        finally:
            socket.close(0)
