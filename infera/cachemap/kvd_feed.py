"""Follows one kvd's events: a snapshot first, then what changes, and a snapshot again after any gap.

kvd's blocks are known only while the connection stands. When it breaks, the entries go at once: engines
would miss on them too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from infera.cachemap.native_map import KvdDecoder, NativeCacheMap
from infera.cachemap.sockets import END_SEQUENCE, FRAMES_BEFORE_YIELD, dealer, read_sequence, subscriber

SNAPSHOT_SILENCE_S_MAX: Final = 5.0
SNAPSHOT_S_MAX: Final = 60.0
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 15.0
NAMESPACES_MAX: Final = 256
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
        cache_map: NativeCacheMap,
    ) -> None:
        self.instance = instance
        self._context = context
        self._topic = f"kvd@{instance}".encode()
        self._pub = pub
        self._snapshot_endpoint = snapshot
        self._map = cache_map
        self._decoder = KvdDecoder(cache_map)
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
            name = f"kvd {self.instance} namespace {namespace}"
            holder = self._map.add_holder(name, counts_copies=False)
            self._decoder.set_namespace(namespace, holder)
            self._holders[namespace] = holder
            self._wants_snapshot.set()
        return self._holders[namespace]

    def drop_namespace(self, namespace: str) -> None:
        """Nobody reads this namespace any more."""
        holder = self._holders.pop(namespace, None)
        if holder is not None:
            self._decoder.drop_namespace(namespace)
            self._map.drop_holder(holder)

    async def run(self) -> None:
        """Follow until cancelled; a broken connection is tried again with growing pauses."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                await self._follow()
            except (_OutOfStepError, TimeoutError, zmq.ZMQError) as error:
                pause_s = RETRY_S_MIN if self.is_in_step else min(pause_s * 2, RETRY_S_MAX)
                self._map.count("kvd", "resync")
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
            self._map.count("kvd", "other_topic")
            return
        sequence = read_sequence(frames[1])
        if sequence is None:
            raise _OutOfStepError("a sequence number must have 8 bytes")
        if self._next_sequence is not None and sequence < self._next_sequence:
            self._map.count("kvd", "duplicate")
            return
        if self._next_sequence is not None and sequence > self._next_sequence:
            self._map.count("kvd", "gap")
            raise _OutOfStepError(f"events {self._next_sequence} to {sequence - 1} were lost")
        self._next_sequence = sequence + 1
        self._apply(frames[2])

    async def _load_snapshot(self) -> None:
        """Replace everything by what kvd says it holds."""
        self._decoder.reset()
        self._next_sequence = None
        self._map.count("kvd", "snapshot")
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
            raise _OutOfStepError("a sequence number must have 8 bytes")
        if sequence == END_SEQUENCE:
            return False
        self._next_sequence = sequence + 1
        self._apply(frames[3])
        return True

    def _apply(self, payload: bytes) -> None:
        if not self._decoder.apply(payload):
            raise _OutOfStepError("a frame could not be read")

    def _forget(self) -> None:
        self.is_in_step = False
        self._decoder.reset()


async def _until_disconnected(monitor: zmq.asyncio.Socket) -> None:
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        if event["event"] == zmq.EVENT_DISCONNECTED:
            return
