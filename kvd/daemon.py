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
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvd import protocol
from kvd.arena_files import ArenaFolder, ArenaFolderError, MappedFile, lock_in_memory, prefault
from kvd.connection import Connection
from kvd.events import ClassName, EventPublisher
from kvd.http import HttpServer
from kvd.protocol import Frame, Kind, Message, ProtocolError, RefusedError, encode
from kvd.sockets import bind_unix, check_socket_path
from kvd.store import RECORDS_MAX, Store, StoreEvent, StoreRefusedError, index_bytes, ledger_bytes

VERSION = "0.1.0"
CAPABILITIES = ("ram", "events", "snapshot")
CONNECTIONS_MAX = 512
RESERVATION_DEADLINE_S = 30.0
INCOMPLETE_MAX_S = 30.0
EXPIRE_INTERVAL_S = 0.5
ACCEPT_PAUSE_S = 1.0
"""After a failed accept, such as for want of descriptors, which trying again at once would not mend."""
MODEL_NAME_CHARACTERS_MAX = 4096
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
    has_spoken: bool = False
    """Whether it has sent anything after HELLO: before that it cannot know its ledger or hold a pin."""


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
        self._undo = AsyncExitStack()
        """Takes away, newest first, what has been made so far."""

    async def start(self) -> None:
        """Make the arena and listen. What was made is taken away again when something fails.

        Raises:
            ArenaFolderError: when the memory cannot be had or another daemon owns the folder.
            OSError: when the socket or the port cannot be bound.
        """
        try:
            check_socket_path(self.settings.socket_path)
            self._make_arena()
            await self._listen()
        except BaseException:
            await self._undo.aclose()
            raise

    def _make_arena(self) -> None:
        settings = self.settings
        self._folder = ArenaFolder(settings.arena_path)
        self._undo.callback(self._folder.close)
        if freed_bytes := self._folder.remove_left_overs():
            log.info("removed %d MiB left by a daemon that was killed", freed_bytes >> 20)
        data_bytes = settings.memory_bytes // 4096 * 4096
        self._folder.check_room(data_bytes)
        records = settings.records or max(RECORDS_MIN, data_bytes // RECORD_BYTES_EXPECTED)
        if records > RECORDS_MAX:
            raise ArenaFolderError(f"{records} records; an index has at most {RECORDS_MAX}, lower --records")
        self._ledger_bytes = ledger_bytes(records)
        index_size = index_bytes(records, settings.shards_max)
        self._folder.check_room(data_bytes + index_size)
        stem = self.instance.hex()[:12]
        self._index = self._folder.create(f"{stem}.index", index_size)
        self._undo.callback(self._index.close)
        self._data = self._folder.create(f"{stem}.data", data_bytes)
        self._undo.callback(self._data.close)
        self._prepare_memory()
        self.store = Store(
            self._index.memory, instance=self.instance, generation=self.generation, records=records,
            shards_max=settings.shards_max, data_bytes=data_bytes,
            seed=(secrets.randbits(64), secrets.randbits(64)),
        )  # fmt: skip
        self._undo.callback(self._end_store)

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
        self._undo.callback(self._end_listener)
        self.events = EventPublisher(
            self.instance.hex(),
            path.with_name(path.name + ".pub"),
            path.with_name(path.name + ".snapshot"),
            self._classes.__getitem__,
            self._exact_snapshot,
        )
        self._undo.push_async_callback(self.events.close)
        self.http = HttpServer(self.metrics, self.describe)
        self._undo.push_async_callback(self.http.close)
        if port := self.settings.http_port:
            try:
                await self.http.start(port)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise OSError(f"cannot serve pages on port {port}: {reason}; choose another --http-port") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        self._tasks.append(loop.create_task(self._expire_forever()))
        self._undo.callback(self._end_tasks)
        log.info(
            "ready socket=%s memory_mib=%d records=%d instance=%s",
            path, self._data.size_bytes >> 20, self.store.stats()["record_capacity"], self.instance.hex(),
        )  # fmt: skip

    async def close(self) -> None:
        """Stop serving and remove the arena's files."""
        await self._undo.aclose()
        log.info("stopped")

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _end_listener(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.settings.socket_path.unlink(missing_ok=True)

    def _end_store(self) -> None:
        for connection in list(self._connections):
            connection.close()
        for process in list(self._processes.values()):
            self._forget(process)
        self.store.close()

    # ---- connections ----

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("cannot accept a client: %s; raise the limit on open files (ulimit -n)", error)
            loop.remove_reader(self._listener)
            loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
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

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _on_closed(self, connection: Connection) -> None:
        process = self._connections.pop(connection, None)
        if process is None:
            return
        # Not the end of its pins: a copy may still run. The pidfd says when the process is gone. But who
        # gave up before our answer to HELLO came knows nothing of this client and will start a new one.
        process.connections.discard(connection)
        if not process.connections and not process.has_spoken:
            self._forget(process)

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
        except Exception as error:
            connection.send(encode(frame.message, Kind.ERROR, frame.request_id, self._refusal(error)))
            return
        connection.send(encode(frame.message, Kind.ANSWER, frame.request_id, answer))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_events)

    def _refusal(self, error: Exception) -> bytes:
        """What a client is told when its request fails. Whatever it was, the daemon goes on."""
        if isinstance(error, RefusedError | StoreRefusedError | ProtocolError | ArenaFolderError):
            text = str(error)
        elif isinstance(error, struct.error | KeyError | TypeError | ValueError):
            text = f"the request is malformed: {error!r}"
        else:
            log.error("a request failed", exc_info=error)
            text = f"infera-kvd could not do it: {error}"
        return text.encode(errors="replace")[:4096]

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
            if connection.is_sending:
                raise RefusedError("HELLO comes first on a connection")
            index = self._index_read_only()
            try:
                process = self._resume(request) or self._admit(connection, request)
            except BaseException:
                os.close(index)
                raise
            process.connections.add(connection)
            self._connections[connection] = process
            answer |= {"client": process.number, "token": process.token}
            descriptors = [index, self._data.descriptor, process.ledger.descriptor]
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
        if not connection.received or not is_pidfd(connection.received[0]):
            raise RefusedError("a client must send a pidfd of itself with HELLO")
        name, pid = str(request.get("name", "?"))[:64], int(str(request.get("pid", 0)))
        token = secrets.randbits(63)
        ledger = self._folder.create(f"{secrets.token_hex(8)}.ledger", self._ledger_bytes)
        try:
            number = self.store.attach(ledger.memory, token)
        except StoreRefusedError:
            ledger.close()
            raise
        pidfd = connection.received.pop(0)
        process = ClientProcess(number, name, pid, pidfd, token, ledger)
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
                return protocol.encode_json(self._status(frame.payload))
            case Message.DROP:
                return self._drop(protocol.decode_json(frame.payload))
        process = self._connections[connection]
        if process is None:
            raise RefusedError("say HELLO as an engine first")
        process.has_spoken = True
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
            case Message.VERIFY:
                return self._verify(frame.payload)
            case Message.BYE:
                self._forget(process)
                return b""
        raise RefusedError(f"unknown message type {frame.message}; this is infera-kvd {VERSION}")

    def _open(self, request: dict[str, object]) -> bytes:
        namespace, group, model = str(request["namespace"]), request["group"], str(request.get("model", ""))
        shard_bytes = request["shard_bytes"]
        if type(group) is not int or not 0 <= group < 2**32:
            raise RefusedError("OPEN needs a group number of 32 bits")
        digest = bytes.fromhex(namespace)
        if digest.hex() != namespace or len(digest) != 16:
            raise RefusedError("OPEN needs a namespace of 32 lower-case hex digits")
        if len(model) > MODEL_NAME_CHARACTERS_MAX:
            raise RefusedError(f"a model name has at most {MODEL_NAME_CHARACTERS_MAX} characters")
        if not isinstance(shard_bytes, list) or not all(type(b) is int and 0 < b < 2**63 for b in shard_bytes):
            raise RefusedError("OPEN needs shard_bytes, a list of positive sizes")
        opened = self.store.open_class(digest, group, shard_bytes, model)
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

    def _verify(self, payload: bytes) -> bytes:
        (class_id,) = protocol.TOUCH_HEAD.unpack_from(payload)
        keys = payload[protocol.TOUCH_HEAD.size :]
        _check_batch(keys, 16)
        if len(keys) // 16 > protocol.VERIFY_BATCH_MAX:
            raise ProtocolError(f"VERIFY takes at most {protocol.VERIFY_BATCH_MAX} records")
        if damaged := self.store.verify(self._data.memory, class_id, keys):
            log.warning("dropped %d damaged records of class %d: something wrote over them", damaged, class_id)
        return damaged.to_bytes(4, "little")

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
            try:
                self.store.expire(time.monotonic_ns(), int(INCOMPLETE_MAX_S * 1e9))
                self._flush_events()
                self.events.beat()
            except Exception:
                log.exception("deadlines or events failed; trying again")

    def _status(self, payload: bytes) -> dict[str, object]:
        """`describe`, and on demand `audit`: null when all books add up. That walks every record."""
        wanted = protocol.decode_json(payload) if payload else {}
        return self.describe() | ({"audit": self.store.audit()} if wanted.get("audit") else {})

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


def is_pidfd(descriptor: int) -> bool:
    """Whether a descriptor stands for a process: only then it says when that is gone."""
    try:
        return "\nPid:" in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:
        return False
