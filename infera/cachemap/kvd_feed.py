"""Follows one kvd's events: a snapshot first, then what changes, and a snapshot again after any gap.

kvd's blocks are known only while the connection stands. When it breaks, the entries go at once: engines
would miss on them too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from infera.cachemap.events import EventFormatError
from infera.cachemap.interface import CacheMap
from infera.cachemap.kvd_events import KvdChange, KvdCleared, decode_kvd_events
from infera.cachemap.sockets import FRAMES_BEFORE_YIELD, dealer, read_sequence, subscriber

SNAPSHOT_SILENCE_S_MAX: Final = 5.0
SNAPSHOT_S_MAX: Final = 60.0
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 15.0
NAMESPACES_MAX: Final = 256
END_SEQUENCE: Final = 2**64 - 1
_log = logging.getLogger(__name__)


class _OutOfStepError(Exception):
    """The stream has a gap, a frame that cannot be read, or no connection: a snapshot is needed."""


class KvdFeed:
    """One kvd instance. Only namespaces that a worker names are entered in the map."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        instance: str,
        pub: str,
        snapshot: str,
        cache_map: CacheMap,
        counters: Counter[str],
    ) -> None:
        self.instance = instance
        self._context = context
        self._topic = f"kvd@{instance}".encode()
        self._pub = pub
        self._snapshot_endpoint = snapshot
        self._map = cache_map
        self._counters = counters
        self._holders: dict[str, int] = {}
        self._next_sequence: int | None = None
        self._wants_snapshot = asyncio.Event()
        self.is_in_step = False

    def add_namespace(self, namespace: str) -> int:
        """The holder of a namespace; a new one is filled by the next snapshot, which is asked for at once.

        Raises ValueError at the limit of namespaces.
        """
        if namespace not in self._holders:
            if len(self._holders) >= NAMESPACES_MAX:
                raise ValueError(f"more than {NAMESPACES_MAX} namespaces in one kvd")
            self._holders[namespace] = self._map.add_holder(
                f"kvd {self.instance} namespace {namespace}", counts_copies=False
            )
            self._wants_snapshot.set()
        return self._holders[namespace]

    def drop_namespace(self, namespace: str) -> None:
        """Nobody reads this namespace any more."""
        holder = self._holders.pop(namespace, None)
        if holder is not None:
            self._map.drop_holder(holder)

    async def run(self) -> None:
        """Follow until cancelled; a broken connection is tried again with growing pauses."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                await self._follow()
            except (_OutOfStepError, EventFormatError, TimeoutError, zmq.ZMQError) as error:
                pause_s = RETRY_S_MIN if self.is_in_step else min(pause_s * 2, RETRY_S_MAX)
                self._counters["resync"] += 1
                _log.warning("cachemap: kvd %s out of step (%s); asking again in %.1f s", self.instance, error, pause_s)
            finally:
                self._forget()
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        socket = subscriber(self._context, self._pub, self._topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watch = asyncio.create_task(_until_disconnected(monitor))
        try:
            while True:
                self._wants_snapshot.clear()
                await self._load_snapshot()
                self.is_in_step = True
                await self._follow_live(socket, watch)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            socket.disable_monitor()
            socket.close(0)

    async def _follow_live(self, socket: zmq.asyncio.Socket, watch: asyncio.Task[None]) -> None:
        """Apply live frames until a snapshot is wanted. Raises _OutOfStepError when the stream breaks."""
        wanted = asyncio.create_task(self._wants_snapshot.wait())
        receive: asyncio.Future[list[bytes]] | None = None
        try:
            count = 0
            while not self._wants_snapshot.is_set():
                receive = asyncio.ensure_future(socket.recv_multipart())
                await asyncio.wait({receive, wanted, watch}, return_when=asyncio.FIRST_COMPLETED)
                if receive.done():
                    self._live(receive.result())
                elif watch.done():
                    raise _OutOfStepError("the connection broke")
                count += 1
                if count % FRAMES_BEFORE_YIELD == 0:
                    await asyncio.sleep(0)
        finally:
            wanted.cancel()
            if receive is not None and not receive.done():
                receive.cancel()

    def _live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[0] != self._topic:
            self._counters["other_topic"] += 1
            return
        sequence = read_sequence(frames[1])
        if sequence is None:
            raise EventFormatError("a sequence number must have 8 bytes")
        if self._next_sequence is not None and sequence < self._next_sequence:
            self._counters["duplicate"] += 1
            return
        if self._next_sequence is not None and sequence > self._next_sequence:
            self._counters["gap"] += 1
            raise _OutOfStepError(f"events {self._next_sequence} to {sequence - 1} were lost")
        self._next_sequence = sequence + 1
        self._apply(frames[2])

    async def _load_snapshot(self) -> None:
        """Replace everything by what kvd says it holds."""
        self._clear()
        self._next_sequence = None
        self._counters["snapshot"] += 1
        socket = dealer(self._context, self._snapshot_endpoint)
        try:
            await socket.send_multipart([b"", b"snapshot"])
            async with asyncio.timeout(SNAPSHOT_S_MAX):
                count = 0
                while await self._snapshot_part(socket):
                    count += 1
                    if count % FRAMES_BEFORE_YIELD == 0:
                        await asyncio.sleep(0)
        finally:
            socket.close(0)

    async def _snapshot_part(self, socket: zmq.asyncio.Socket) -> bool:
        async with asyncio.timeout(SNAPSHOT_SILENCE_S_MAX):
            frames = await socket.recv_multipart()
        if len(frames) != 4 or frames[1] != self._topic:
            raise _OutOfStepError("another kvd answered the snapshot")
        sequence = read_sequence(frames[2])
        if sequence is None:
            raise EventFormatError("a sequence number must have 8 bytes")
        if sequence == END_SEQUENCE:
            return False
        self._next_sequence = sequence + 1
        self._apply(frames[3])
        return True

    def _apply(self, payload: bytes) -> None:
        for event in decode_kvd_events(payload):
            if isinstance(event, KvdCleared):
                self._counters["cleared"] += 1
                self._clear()
            elif not isinstance(event, KvdChange):
                self._counters["unknown_event"] += 1
            else:
                self._change(event)

    def _change(self, event: KvdChange) -> None:
        holder = self._holders.get(event.namespace)
        if holder is None or event.group != 0:
            self._counters["other_namespace" if holder is None else "other_group"] += len(event.keys)
        elif event.kind == "stored":
            refused = self._map.store(holder, event.tier, event.keys)
            self._counters["refused_full"] += refused
            self._counters["stored"] += len(event.keys) - refused
        else:
            unknown = self._map.remove(holder, event.tier, event.keys)
            self._counters["removed_unknown"] += unknown
            self._counters["removed"] += len(event.keys) - unknown

    def _clear(self) -> None:
        for holder in self._holders.values():
            self._map.clear(holder)

    def _forget(self) -> None:
        self.is_in_step = False
        self._clear()


async def _until_disconnected(monitor: zmq.asyncio.Socket) -> None:
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        if event["event"] == zmq.EVENT_DISCONNECTED:
            return
