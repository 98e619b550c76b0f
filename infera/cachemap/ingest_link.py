"""A server's connection to the ingest process: starts it, reads its map, and starts it again when it dies.

While nobody keeps a map nothing is matched, which only means hits that are not predicted; ``problems`` says so. A new
process builds the map from replays and snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import socket
import subprocess
import sys
import time
from typing import Final

import msgspec

from infera.cachemap.follower import now_ms
from infera.cachemap.ingest_wire import (
    HELLO,
    Add,
    Holders,
    Lane,
    Predict,
    Remove,
    ToIngest,
    ToServer,
    WireError,
    address,
    peer_user,
    receive,
    send,
)
from infera.cachemap.interface import WorkerHolders
from infera.cachemap.load_table import LoadLane, map_whole
from infera.cachemap.native_map import ENTRY_LIMIT_DEFAULT, MapReader, MapUnusableError
from infera.discovery.record import WorkerRecord, encode_record

START_S_MAX: Final = 30.0
CONNECT_PAUSE_S: Final = 0.05
RETRY_S_MIN: Final = 0.25
RETRY_S_MAX: Final = 15.0
LOOK_S: Final = 2.0
STUCK_MS: Final = 20_000
"""The ingest process says four times a second that it is alive; silent for this long, it is started anew."""
STOP_S_MAX: Final = 5.0
QUIET_START_S: Final = 10.0
_DECODER: Final = msgspec.msgpack.Decoder(ToServer)
_log = logging.getLogger(__name__)


class IngestLink:
    """See fleet_cache.Ingest. Servers of one user on one host that have the same ``name`` share an ingest process:
    the first starts it, and it ends when the last is gone."""

    def __init__(self, entry_limit: int = ENTRY_LIMIT_DEFAULT, name: str | None = None) -> None:
        self.reader: MapReader | None = None
        self.directory: dict[str, WorkerHolders] = {}
        self.load_lane: LoadLane | None = None
        self.restarts = 0
        self._entry_limit = entry_limit
        self._shared_name = f"{os.getuid()}-{name}" if name is not None else None
        self._load_memory: mmap.mmap | None = None
        self._records: dict[str, WorkerRecord] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._problems: tuple[str, ...] = ()
        self._why_down = "it is starting"
        self._down_since_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start or join the ingest process; does not wait until it is there."""
        self._task = asyncio.create_task(self._run(), name="the cache map's ingest process")

    async def close(self) -> None:
        """Forget the map, and stop the process unless others may use it: then it ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._shared_name is None:
            await self._end_process()

    def add_worker(self, record: WorkerRecord) -> None:
        """Follow a worker's events, and its kvd's."""
        self._records[record.incarnation] = record
        self._say(Add(encode_record(record)))

    def change_worker(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Follow what changed and keep the rest."""
        del old
        self.add_worker(new)

    def remove_worker(self, record: WorkerRecord) -> None:
        """Forget what the worker held."""
        self._records.pop(record.incarnation, None)
        self.directory.pop(record.incarnation, None)
        self._say(Remove(record.incarnation))

    def predict(self, holder: int, keys: bytes) -> None:
        """Enter what a request just sent there will store."""
        self._say(Predict(holder, keys))

    def problems(self) -> list[str]:
        """What is not followed, in words."""
        if self.reader is None:
            is_new = self.restarts == 0 and time.monotonic() - self._down_since_s < QUIET_START_S
            return [] if is_new else [f"no cache is seen: the cache map's ingest process is down ({self._why_down})"]
        return list(self._problems)

    def _say(self, message: ToIngest) -> None:
        if self._writer is None:
            # A record is sent again when there is somebody to send it to; a prediction is not worth keeping.
            return
        try:
            send(self._writer, message)
        except WireError:
            self._writer.transport.abort()

    async def _run(self) -> None:
        pause_s = RETRY_S_MIN
        while True:
            started_s = time.monotonic()
            try:
                await self._follow()
            except (WireError, MapUnusableError, OSError, TimeoutError, msgspec.DecodeError) as error:
                self._why_down = str(error)
            finally:
                self._forget()
            pause_s = RETRY_S_MIN if time.monotonic() - started_s > RETRY_S_MAX else min(pause_s * 2, RETRY_S_MAX)
            self.restarts += 1
            _log.warning("cachemap: the ingest process is down (%s); again in %.2f s", self._why_down, pause_s)
            await self._end_process()
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        connection = try_to_connect(self._shared_name) if self._shared_name is not None else None
        if connection is None:
            name = self._shared_name or secrets.token_hex(16)
            self._start_process(name)
            connection = await self._connect(name)
        await self._read_hello(connection)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            self._writer = writer
            for record in self._records.values():
                self._say(Add(encode_record(record)))
            await self._listen(reader)
        finally:
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        message = asyncio.create_task(receive(reader))
        since_ms = now_ms()
        try:
            while True:
                done, _ = await asyncio.wait({message}, timeout=LOOK_S)
                if done:
                    self._take(_DECODER.decode(message.result()))
                    message = asyncio.create_task(receive(reader))
                elif self.reader and now_ms() - max(since_ms, self.reader.facts().beat_ms) > STUCK_MS:
                    raise TimeoutError(f"it has not moved for {STUCK_MS // 1000} s")
        finally:
            message.cancel()
            await asyncio.gather(message, return_exceptions=True)

    def _take(self, message: ToServer) -> None:
        if isinstance(message, Holders):
            if message.incarnation in self._records:
                self.directory[message.incarnation] = WorkerHolders(message.ranks, message.shared)
        elif isinstance(message, Lane):
            self._take_lane(message.number)
        else:
            self._problems = message.lines

    def _take_lane(self, number: int | None) -> None:
        memory, self._load_memory = self._load_memory, None
        if number is None:
            _log.warning(
                "cachemap: all lanes of the load table are taken: other servers of this host do not see our load"
            )
        elif memory is not None:
            self.load_lane = LoadLane(memory, number)

    def _start_process(self, name: str) -> None:
        # A session of its own: Ctrl-C is for the server, which stops it in order. Not asyncio's: it would be killed
        # with this loop, under the eyes of others who share it.
        command = [sys.executable, "-m", "infera.cachemap.ingest", "--name", name, "--entries", str(self._entry_limit)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    async def _connect(self, name: str) -> socket.socket:
        """Connects as soon as somebody listens. Who starts it at the same moment as we may be quicker."""
        async with asyncio.timeout(START_S_MAX):
            while (connection := try_to_connect(name)) is None:
                if self._process is not None and (status := self._process.poll()) is not None:
                    raise WireError(f"it ended with status {status}")
                await asyncio.sleep(CONNECT_PAUSE_S)
        return connection

    async def _read_hello(self, connection: socket.socket) -> None:
        """Maps the memory."""
        try:
            self.reader, self._load_memory = await asyncio.to_thread(_read_hello, connection)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)

    def _forget(self) -> None:
        self._writer = None
        self.reader = None
        self.load_lane = self._load_memory = None
        self.directory.clear()
        self._problems = ()
        self._down_since_s = time.monotonic()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


def try_to_connect(name: str) -> socket.socket | None:
    """A connection to the ingest process of that name; None while nobody listens.

    Raises:
        WireError: when it belongs to another user: the name is for anybody to take.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address(name))
    except OSError:
        connection.close()
        return None
    if peer_user(connection) != os.getuid():
        connection.close()
        raise WireError(f"the ingest process {name} belongs to another user; choose another name")
    return connection


def _read_hello(connection: socket.socket) -> tuple[MapReader, mmap.mmap]:
    """The map, and the memory of the load table."""
    connection.settimeout(START_S_MAX)
    hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO), 2)
    try:
        if hello != HELLO or len(descriptors) != 2:
            raise WireError("the process at the socket is not this version's ingest process")
        return MapReader.of_descriptor(descriptors[0]), map_whole(descriptors[1])
    except ValueError as error:
        raise WireError(str(error)) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
