"""The ingest process: follows all events of a fleet and writes the cache map, which servers read. It also makes the
load table, in which each server has a lane (see ``load_table``).

    python -m infera.cachemap.ingest --name NAME [--entries N]

A server starts it and looks after it (``ingest_link``); further servers of the host may connect to the same
name. It ends with the server that started it, or when the last one is gone. Only processes of the same user are let in.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
from typing import Final

import msgspec

from infera.cachemap.follower import Follower, now_ms
from infera.cachemap.ingest_wire import (
    HELLO,
    Add,
    Holders,
    Lane,
    Predict,
    Problems,
    Remove,
    ToIngest,
    ToServer,
    WireError,
    address,
    peer_user,
    receive,
    send,
)
from infera.cachemap.load_table import LoadTable
from infera.cachemap.native_map import ENTRY_LIMIT_DEFAULT
from infera.discovery.record import RecordError, WorkerRecord, decode_record

SERVERS_MAX: Final = 256
FIRST_S_MAX: Final = 20.0
"""For the first server to come."""
ALONE_S_MAX: Final = 1.0
"""Without a server for this long, the process ends."""
LOOK_S: Final = 0.5
_DECODER: Final = msgspec.msgpack.Decoder(ToIngest)
_log = logging.getLogger(__name__)


class _Server:
    """One connected server and the workers it follows."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.follows: set[str] = set()
        self.told: tuple[str, ...] = ()

    def tell(self, message: ToServer) -> None:
        """Send, or cut a server off that does not read."""
        try:
            send(self.writer, message)
        except WireError as error:
            _log.warning("cachemap: a server is cut off: %s", error)
            self.writer.transport.abort()


class Ingest:
    """Servers on one side, events on the other. Belongs to one event loop."""

    def __init__(self, entry_limit: int) -> None:
        self._servers: set[_Server] = set()
        self._records: dict[str, WorkerRecord] = {}
        self._follower = Follower(entry_limit, self._changed)
        self._loads = LoadTable()
        self._ends_ms = now_ms() + FIRST_S_MAX * 1000

    async def run(self, name: str) -> None:
        """Serve until nobody is left."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listening.bind(address(name))
        listening.listen(16)
        self._follower.start()
        accepting = asyncio.create_task(self._accept(listening))
        try:
            while self._servers or now_ms() < self._ends_ms:
                await asyncio.sleep(LOOK_S)
                self._tell_problems()
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listening.close()
            await self._follower.close()
            self._loads.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        serving: set[asyncio.Task[None]] = set()
        while True:
            connection, _ = await loop.sock_accept(listening)
            if peer_user(connection) != os.getuid() or len(self._servers) >= SERVERS_MAX:
                connection.close()
                continue
            socket.send_fds(connection, [HELLO], [self._follower.map.descriptor, self._loads.descriptor])
            task = asyncio.create_task(self._serve(connection))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        server = _Server(writer)
        self._servers.add(server)
        lane = self._loads.claim()
        server.tell(Lane(lane))
        try:
            while True:
                self._take(server, _DECODER.decode(await receive(reader)))
        except WireError:
            pass
        except (msgspec.DecodeError, RecordError) as error:
            _log.warning("cachemap: a server is cut off: %s", error)
        finally:
            self._servers.discard(server)
            if lane is not None:
                self._loads.release(lane)
            for incarnation in tuple(server.follows):
                self._remove(server, incarnation)
            self._ends_ms = now_ms() + ALONE_S_MAX * 1000
            writer.close()

    def _take(self, server: _Server, message: ToIngest) -> None:
        if isinstance(message, Add):
            self._add(server, decode_record(message.record))
        elif isinstance(message, Remove):
            self._remove(server, message.incarnation)
        elif isinstance(message, Predict):
            self._follower.map.predict(message.holder, message.keys, now_ms=now_ms())

    def _add(self, server: _Server, record: WorkerRecord) -> None:
        server.follows.add(record.incarnation)
        known = self._records.get(record.incarnation)
        self._records[record.incarnation] = record
        if known is None:
            self._follower.add_worker(record)
        elif known != record:
            self._follower.change_worker(known, record)
        else:
            server.tell(self._holders(record.incarnation))

    def _remove(self, server: _Server, incarnation: str) -> None:
        server.follows.discard(incarnation)
        if not any(incarnation in other.follows for other in self._servers):
            record = self._records.pop(incarnation, None)
            if record is not None:
                self._follower.remove_worker(record)

    def _holders(self, incarnation: str) -> Holders:
        holders = self._follower.holders(incarnation)
        return Holders(incarnation, holders.ranks, holders.shared)

    def _changed(self, incarnation: str) -> None:
        for server in self._servers:
            if incarnation in server.follows:
                server.tell(self._holders(incarnation))

    def _tell_problems(self) -> None:
        lines = tuple(self._follower.problems())
        for server in self._servers:
            if server.told != lines:
                server.told = lines
                server.tell(Problems(lines))


def main() -> None:
    """Run until the last server is gone or SIGTERM comes."""
    parser = argparse.ArgumentParser(prog="python -m infera.cachemap.ingest", description=__doc__)
    parser.add_argument("--name", required=True, help="of the abstract Unix socket to listen on")
    parser.add_argument("--entries", type=int, default=ENTRY_LIMIT_DEFAULT, help="blocks of all workers, at most")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_until_told(Ingest(options.entries), options.name))


async def _until_told(ingest: Ingest, name: str) -> None:
    work = asyncio.create_task(ingest.run(name))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    await asyncio.gather(work, return_exceptions=True)
    if not work.cancelled() and work.exception() is not None:
        raise SystemExit(f"cachemap: the ingest process cannot go on: {work.exception()!r}")


if __name__ == "__main__":
    main()
