"""The cache daemon: owns the arena, answers clients, publishes what changes.

One thread runs everything: an event loop over the unix socket, the pidfds of client processes and
a timer for deadlines. Engines touch the arena's memory directly; what comes through here is control.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvd import protocol
from kvd.arena_files import ArenaFolder, MappedFile, lock_in_memory, prefault
from kvd.connection import Connection
from kvd.events import ClassName, EventPublisher
from kvd.http import HttpServer
from kvd.protocol import Frame, Kind, Message, ProtocolError, RefusedError, encode
from kvd.store import Store, StoreEvent, StoreRefusedError, index_bytes, ledger_bytes

VERSION = "0.1.0"
CAPABILITIES = ("ram", "events", "snapshot")
CONNECTIONS_MAX = 512
RESERVATION_DEADLINE_S = 30.0
INCOMPLETE_MAX_S = 30.0
EXPIRE_INTERVAL_S = 0.5
RECORD_BYTES_EXPECTED = 32 * 1024
"""Sizes the index: one record for every so many bytes of memory."""
RECORDS_MIN = 1024

log = logging.getLogger("kvd")


@dataclass(frozen=True)
class DaemonSettings:
    """What a daemon needs to know. Sizes in bytes; `http_port` 0 for no pages."""

    socket_path: Path
    arena_path: Path
    memory_bytes: int
    records: int | None = None
    shards_max: int = 8
    http_port: int = 0
    prefault: bool = True


@dataclass
class ClientProcess:
    """A process that may hold pins and reservations; it ends with the process, not with a socket."""

    number: int
    name: str
    pid: int
    pidfd: int
    token: int
    ledger: MappedFile
    connections: set[Connection] = field(default_factory=set)


class Daemon:
    """The running daemon. `start` makes everything, `close` takes it away again."""

    def __init__(self, settings: DaemonSettings) -> None:
        self.settings = settings
        self.instance = secrets.token_bytes(16)
        self.generation = time.time_ns()
        self._classes: dict[int, ClassName] = {}
        self._processes: dict[int, ClientProcess] = {}
        self._connections: dict[Connection, ClientProcess | None] = {}
        self._malformed_total = 0
        self._refused_peers_total = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._flush_scheduled = False

    async def start(self) -> None:
        """Make the arena and listen.

        Raises:
            ArenaFolderError: when the memory cannot be had or another daemon owns the folder.
            OSError: when the socket or the port cannot be bound.
        """
        settings = self.settings
        self._folder = ArenaFolder(settings.arena_path)
        if freed_bytes := self._folder.remove_left_overs():
            log.info("removed %d MiB left by a daemon that was killed", freed_bytes >> 20)
        data_bytes = settings.memory_bytes // 4096 * 4096
        records = settings.records or max(RECORDS_MIN, data_bytes // RECORD_BYTES_EXPECTED)
        self._ledger_bytes = ledger_bytes(records)
        index_size = index_bytes(records, settings.shards_max)
        self._folder.check_room(data_bytes + index_size)
        stem = self.instance.hex()[:12]
        self._index = self._folder.create(f"{stem}.index", index_size)
        self._data = self._folder.create(f"{stem}.data", data_bytes)
        self._prepare_memory()
        self.store = Store(
            self._index.memory, instance=self.instance, generation=self.generation, records=records,
            shards_max=settings.shards_max, data_bytes=data_bytes,
            seed=(secrets.randbits(64), secrets.randbits(64)),
        )  # fmt: skip
        await self._listen()

    def _prepare_memory(self) -> None:
        if self.settings.prefault:
            prefault(self._data.memory, os.cpu_count() or 1)
        prefault(self._index.memory, 1)
        if refusal := lock_in_memory(self._data.memory):
            log.warning("arena is not locked in memory and may be swapped: %s", refusal)

    async def _listen(self) -> None:
        path = self.settings.socket_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._listener = bind_unix(path)
        self.events = EventPublisher(
            self.instance.hex(),
            path.with_name(path.name + ".pub"),
            path.with_name(path.name + ".snapshot"),
            self._classes.__getitem__,
            self._exact_snapshot,
        )
        self.http = HttpServer(self.metrics, self.describe)
        if self.settings.http_port:
            await self.http.start(self.settings.http_port)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        self._tasks.append(loop.create_task(self._expire_forever()))
        log.info(
            "ready socket=%s memory_mib=%d records=%d instance=%s",
            path, self._data.size_bytes >> 20, self.store.stats()["record_capacity"], self.instance.hex(),
        )  # fmt: skip

    async def close(self) -> None:
        """Stop serving and remove the arena's files."""
        for task in self._tasks:
            task.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.settings.socket_path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        await self.events.close()
        await self.http.close()
        for process in list(self._processes.values()):
            self._forget(process)
        self.store.close()
        self._index.close()
        self._data.close()
        self._folder.close()
        log.info("stopped")

    # ---- connections ----

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("cannot accept a client: %s; raise the limit on open files (ulimit -n)", error)
            return
        sock.setblocking(False)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        refusal = ""
        if uid not in (os.getuid(), 0):
            self._refused_peers_total += 1
            refusal = f"this infera-kvd serves user {os.getuid()}, not user {uid}"
        elif len(self._connections) >= CONNECTIONS_MAX:
            refusal = f"infera-kvd serves at most {CONNECTIONS_MAX} connections"
        connection = Connection(sock, self._on_frame, self._on_closed, self._on_malformed)
        self._connections[connection] = None
        if refusal:
            connection.send(encode(0, Kind.ERROR, 0, refusal.encode()))
            connection.close()

    def _on_closed(self, connection: Connection) -> None:
        process = self._connections.pop(connection, None)
        if process:
            # Not the end of its pins: a copy may still run. The pidfd says when the process is gone.
            process.connections.discard(connection)

    def _on_malformed(self, _connection: Connection, error: ProtocolError) -> None:
        self._malformed_total += 1
        log.warning("closed a connection: %s", error)

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind != Kind.REQUEST:
            raise ProtocolError("a client sends requests only")
        try:
            if frame.message == Message.HELLO:
                self._hello(connection, frame)
                return
            answer = self._answer(connection, frame)
        except (RefusedError, StoreRefusedError, ProtocolError, struct.error, KeyError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, RefusedError | StoreRefusedError | ProtocolError) else repr(error)
            connection.send(encode(frame.message, Kind.ERROR, frame.request_id, text.encode()[:4096]))
            return
        connection.send(encode(frame.message, Kind.ANSWER, frame.request_id, answer))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_events)

    # ---- client processes ----

    def _hello(self, connection: Connection, frame: Frame) -> None:
        request = protocol.decode_json(frame.payload)
        versions = request.get("protocol")
        if not isinstance(versions, list) or protocol.PROTOCOL_VERSION not in versions:
            raise RefusedError(
                f"infera-kvd {VERSION} speaks protocol {protocol.PROTOCOL_VERSION}, the client offers {versions}; "
                "install the same Infera version on both sides"
            )
        if self._connections.get(connection):
            raise RefusedError("HELLO was said already")
        answer = {
            "protocol": protocol.PROTOCOL_VERSION,
            "version": VERSION,
            "capabilities": CAPABILITIES,
            "instance": self.instance.hex(),
            "generation": self.generation,
            "pub": self.events.publish_endpoint,
            "snapshot": self.events.snapshot_endpoint,
        }
        descriptors: list[int] = []
        if request.get("role") == "engine":
            process = self._resume(request) or self._admit(connection, request)
            process.connections.add(connection)
            self._connections[connection] = process
            answer |= {"client": process.number, "token": process.token}
            descriptors = [self._index_read_only(), self._data.descriptor, process.ledger.descriptor]
        payload = encode(Message.HELLO, Kind.ANSWER, frame.request_id, protocol.encode_json(answer))
        connection.send(payload, descriptors)
        if descriptors:
            os.close(descriptors[0])

    def _index_read_only(self) -> int:
        """A descriptor that cannot be mapped writable: only the daemon writes the index."""
        return os.open(self._index.path, os.O_RDONLY | os.O_CLOEXEC)

    def _resume(self, request: dict[str, object]) -> ClientProcess | None:
        """The process of an earlier connection, when it proves to be the same."""
        if request.get("instance") != self.instance.hex():
            return None
        process = self._processes.get(int(str(request.get("client", -1))))
        return process if process and process.token == request.get("token") else None

    def _admit(self, connection: Connection, request: dict[str, object]) -> ClientProcess:
        if not connection.received:
            raise RefusedError("a client must send a pidfd of itself with HELLO")
        name = str(request.get("name", "?"))[:64]
        token = secrets.randbits(63)
        ledger = self._folder.create(f"{secrets.token_hex(8)}.ledger", self._ledger_bytes)
        try:
            number = self.store.attach(ledger.memory, token)
        except StoreRefusedError:
            ledger.close()
            raise
        pidfd = connection.received.pop(0)
        process = ClientProcess(number, name, int(str(request.get("pid", 0))), pidfd, token, ledger)
        self._processes[number] = process
        asyncio.get_running_loop().add_reader(pidfd, self._process_ended, process)
        log.info("client joined number=%d name=%s pid=%d", number, name, process.pid)
        return process

    def _process_ended(self, process: ClientProcess) -> None:
        log.info("client ended number=%d name=%s pid=%d", process.number, process.name, process.pid)
        self._forget(process)

    def _forget(self, process: ClientProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        self.store.detach(process.number)
        process.ledger.close()
        del self._processes[process.number]
        for connection in process.connections:
            self._connections[connection] = None

    # ---- requests ----

    def _answer(self, connection: Connection, frame: Frame) -> bytes:
        match frame.message:
            case Message.STATUS:
                return protocol.encode_json(self.describe())
            case Message.DROP:
                return self._drop(protocol.decode_json(frame.payload))
        process = self._connections[connection]
        if process is None:
            raise RefusedError("say HELLO as an engine first")
        match frame.message:
            case Message.OPEN:
                return self._open(protocol.decode_json(frame.payload))
            case Message.RESERVE:
                return self._reserve(process, frame.payload)
            case Message.COMMIT:
                _check_batch(frame.payload, protocol.COMMITMENT.size)
                return self.store.commit(process.number, frame.payload)
            case Message.GIVE_UP:
                _check_batch(frame.payload, 8)
                self.store.give_up(process.number, frame.payload)
                return b""
            case Message.TOUCH:
                (class_id,) = protocol.TOUCH_HEAD.unpack_from(frame.payload)
                keys = frame.payload[protocol.TOUCH_HEAD.size :]
                _check_batch(keys, 16)
                self.store.touch(class_id, keys)
                return b""
            case Message.BYE:
                self._forget(process)
                return b""
        raise RefusedError(f"unknown message type {frame.message}; this is infera-kvd {VERSION}")

    def _open(self, request: dict[str, object]) -> bytes:
        namespace, group, model = str(request["namespace"]), request["group"], str(request.get("model", ""))
        shard_bytes = request["shard_bytes"]
        if not isinstance(group, int) or not 0 <= group < 2**32 or len(namespace) != 32:
            raise RefusedError("OPEN needs a namespace of 32 hex digits and a group number")
        if not isinstance(shard_bytes, list) or not all(type(b) is int and 0 < b < 2**63 for b in shard_bytes):
            raise RefusedError("OPEN needs shard_bytes, a list of positive sizes")
        opened = self.store.open_class(bytes.fromhex(namespace), group, shard_bytes, model)
        if opened.class_id not in self._classes:
            log.info("new class id=%d namespace=%s group=%d model=%s", opened.class_id, namespace, group, model)
            self._classes[opened.class_id] = ClassName(namespace, group, model)
        return protocol.encode_json({"class_id": opened.class_id, "shard_offsets": opened.shard_offsets})

    def _reserve(self, process: ClientProcess, payload: bytes) -> bytes:
        class_id, shard, retention, tenant_tag = protocol.RESERVE_HEAD.unpack_from(payload)
        wishes = payload[protocol.RESERVE_HEAD.size :]
        _check_batch(wishes, protocol.WISH.size)
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + int(RESERVATION_DEADLINE_S * 1e9)
        return self.store.reserve(process.number, class_id, shard, retention, tenant_tag, wishes, now_ns, deadline_ns)

    def _drop(self, request: dict[str, object]) -> bytes:
        matching = [number for number, name in self._classes.items() if name.namespace == request.get("namespace")]
        if not matching:
            known = ", ".join(sorted({name.namespace for name in self._classes.values()})) or "none"
            raise RefusedError(f"no such namespace; known: {known}")
        return protocol.encode_json({"dropped": sum(self.store.drop_class(number) for number in matching)})

    # ---- events, deadlines, facts ----

    def _flush_events(self) -> None:
        self._flush_scheduled = False
        events, some_were_lost = self.store.take_events()
        self.events.publish(events, some_were_lost=some_were_lost)

    def _exact_snapshot(self) -> list[StoreEvent]:
        self._flush_events()
        return list(self.store.snapshot())

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            self.store.expire(time.monotonic_ns(), int(INCOMPLETE_MAX_S * 1e9))
            self._flush_events()

    def metrics(self) -> dict[str, int]:
        """All counters and gauges by name."""
        return self.store.stats() | {
            "connections": len(self._connections),
            "malformed_frames_total": self._malformed_total,
            "refused_peers_total": self._refused_peers_total,
            "event_sequence": self.events.sequence,
            "snapshots_total": self.events.snapshots_total,
        }

    def describe(self) -> dict[str, object]:
        """What `infera-kvd status` shows."""
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "instance": self.instance.hex(),
            "socket": str(self.settings.socket_path),
            "pub": self.events.publish_endpoint,
            "snapshot": self.events.snapshot_endpoint,
            "classes": [
                {"id": number, "namespace": name.namespace, "group": name.group, "model": name.model}
                for number, name in self._classes.items()
            ],
            "clients": [
                {"number": process.number, "name": process.name, "pid": process.pid}
                for process in self._processes.values()
            ],
            "metrics": self.metrics(),
        }


def _check_batch(entries: bytes, entry_bytes: int) -> None:
    if len(entries) % entry_bytes or not 0 < len(entries) // entry_bytes <= protocol.BATCH_MAX:
        raise ProtocolError(f"a batch holds 1 to {protocol.BATCH_MAX} entries of {entry_bytes} bytes")


def bind_unix(path: Path) -> socket.socket:
    """Listen on a unix socket only this user may reach; a stale one is replaced.

    Raises:
        OSError: when somebody listens there already, or the path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
        raise OSError(f"another infera-kvd listens on {path}; stop it or choose another with --socket")
    except (FileNotFoundError, ConnectionRefusedError):
        path.unlink(missing_ok=True)
    finally:
        probe.close()
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error}; choose another path with --socket") from error
    finally:
        os.umask(mask)
    listener.listen(128)
    return listener
