"""The cache daemon: owns the arena, answers clients, publishes what changes.

Python's event loop accepts connections, does the handshake, watches the pidfds of client processes
and publishes events. After the handshake an engine's socket belongs to the hot thread in C (`loop`),
which saves and applies deadlines, and leaves what is rare to Python. Engines touch the arena's memory
directly; what comes through here is control.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvd import protocol
from kvd.arena_files import ArenaFolder, ArenaFolderError, lock_in_memory
from kvd.arena_start import Geometry, start_arena
from kvd.connection import Connection
from kvd.events import ClassName, EventPublisher
from kvd.http import HttpServer
from kvd.listing import listed
from kvd.loop import Loop, Notice
from kvd.processes import ClientProcess, ClientProcesses
from kvd.protocol import Frame, Kind, Message, ProtocolError, RefusedError, encode
from kvd.retention import RETENTIONS, retention_number
from kvd.sockets import bind_unix, check_socket_path
from kvd.store import CLASSES_MAX, StoreEvent, StoreRefusedError

VERSION = "0.1.0"
CAPABILITIES = ("ram", "events", "snapshot", "restart")
CONNECTIONS_MAX = 512
RESERVATION_DEADLINE_S = 30.0
INCOMPLETE_MAX_S = 30.0
EVENT_GATHER_S = 0.005
"""Events are gathered so long before they are published: Python wakes at most 200 times a second."""
STOCK_MAX = 64
ACCEPT_PAUSE_S = 1.0
"""After a failed accept, such as for want of descriptors, which trying again at once would not mend."""
MODEL_NAME_CHARACTERS_MAX = 4096

log = logging.getLogger("kvd")


@dataclass(frozen=True)
class DaemonSettings:
    """What a daemon needs to know. Sizes in bytes; `http_port` 0 for no pages, a quota 0 for none."""

    socket_path: Path
    arena_path: Path
    memory_bytes: int
    records: int | None = None
    shards_max: int = 8
    http_port: int = 0
    prefault: bool = True
    quota_namespace_bytes: int = 0
    quota_tenant_bytes: int = 0


class Daemon:
    """The running daemon. `start` makes everything, `close` takes it away again, but for the arena's files."""

    def __init__(self, settings: DaemonSettings) -> None:
        self.settings = settings
        self.daemon_start = secrets.token_hex(8)
        self._classes: dict[int, ClassName] = {}
        self._connections: set[Connection] = set()
        self._served: dict[int, ClientProcess] = {}
        self._malformed_total = 0
        self._refused_peers_total = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._keeps_files = False
        """Whether the arena outlives this daemon: not when it is new and the start fails."""
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
        wanted = Geometry.of(settings.memory_bytes, settings.records, settings.shards_max)
        self._arena = start_arena(self._folder, wanted, with_prefault=settings.prefault)
        self._keeps_files = self._arena.is_adopted
        self._undo.callback(lambda: self._arena.close(keep=self._keeps_files))
        self.store = self._arena.store
        self.store.set_clock(int(time.time()))
        self.store.set_quotas(settings.quota_namespace_bytes, settings.quota_tenant_bytes)
        self.loop = Loop(self.store.handle, reservation_s=RESERVATION_DEADLINE_S, incomplete_s=INCOMPLETE_MAX_S)
        self.store.guard = self.loop
        self._processes = ClientProcesses(
            self._folder, self.store, self.loop, wanted.ledger_bytes, self._close_connections
        )
        self._undo.callback(self._end_store)
        for number, ledger in self._arena.clients:
            self._processes.adopt(number, ledger)
        for class_id in range(CLASSES_MAX):
            if identity := self.store.identify_class(class_id):
                self._classes[class_id] = ClassName(identity.namespace.hex(), identity.group, identity.model)
        if self._arena.is_adopted:
            self._undo.push_async_callback(self._finish_locking, asyncio.create_task(self._lock_adopted()))

    @property
    def instance(self) -> bytes:
        """Names the arena; the same after a restart that adopts it."""
        return self._arena.instance

    async def _lock_adopted(self) -> None:
        """Lock an adopted arena in memory while it is being served: that walks all its pages."""
        if refusal := await asyncio.to_thread(lock_in_memory, self._arena.data.memory):
            log.warning("arena is not locked in memory and may be swapped: %s", refusal)

    async def _finish_locking(self, task: asyncio.Task[None]) -> None:
        await asyncio.gather(task, return_exceptions=True)

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
            # Larger than any number before a restart, so that whoever followed the last daemon sees a gap.
            first_sequence=time.time_ns() // 1000,
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
        loop.add_reader(self.loop.notice_descriptor, self._on_notices)
        loop.add_reader(self.loop.events_descriptor, self._gather_events)
        log.info(
            "ready socket=%s memory_mib=%d records=%d instance=%s",
            path, self._arena.data.size_bytes >> 20, self.store.stats()["record_capacity"], self.instance.hex(),
        )  # fmt: skip
        self._keeps_files = True

    async def close(self) -> None:
        """Stop serving. The arena stays for the next daemon."""
        kept_mib = self._arena.data.size_bytes >> 20
        await self._undo.aclose()
        log.info(
            "stopped; %d MiB of cache stay in %s for the next infera-kvd; free them with: infera-kvd clear --path %s",
            kept_mib, self.settings.arena_path, self.settings.arena_path,
        )  # fmt: skip

    def _end_listener(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.settings.socket_path.unlink(missing_ok=True)

    def _end_store(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.loop.notice_descriptor)
        loop.remove_reader(self.loop.events_descriptor)
        if self._gathering:
            self._gathering.cancel()
        for connection in list(self._connections):
            connection.close()
        self.loop.stop()
        self.store.guard = contextlib.nullcontext()
        self.store.close()
        self._processes.close(keep_files=self._keeps_files)

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
        elif len(self._connections) + len(self._served) >= CONNECTIONS_MAX:
            refusal = f"infera-kvd serves at most {CONNECTIONS_MAX} connections"
        connection = Connection(sock, self._on_frame, self._on_closed, self._on_malformed)
        self._connections.add(connection)
        if refusal:
            connection.send(encode(0, Kind.ERROR, 0, refusal.encode()))
            connection.close()

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _on_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

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
            answer = self._answer(None, frame)
        except Exception as error:
            connection.send(encode(frame.message, Kind.ERROR, frame.request_id, self._refusal(error)))
            return
        connection.send(encode(frame.message, Kind.ANSWER, frame.request_id, answer))

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
        answer = {
            "protocol": protocol.PROTOCOL_VERSION,
            "version": VERSION,
            "capabilities": CAPABILITIES,
            "instance": self.instance.hex(),
            "generation": self._arena.generation,
            "daemon_start": self.daemon_start,
            "pub": self.events.publish_endpoint,
            "snapshot": self.events.snapshot_endpoint,
        }
        if request.get("role") == "engine":
            if connection.is_sending:
                raise RefusedError("HELLO comes first on a connection")
            process = self._resume(connection, request) or self._admit(connection, request)
            answer |= {"client": process.number, "token": process.token}
            try:
                with ExitStack() as opened:
                    descriptors = self._open_for(process, opened)
                    connection.send(_hello_answer(frame, answer), descriptors)
            except OSError:
                self._processes.lost_connection(process)
                raise
            self._serve(connection, process)
            return
        connection.send(_hello_answer(frame, answer))

    def _open_for(self, process: ClientProcess, opened: ExitStack) -> list[int]:
        """Descriptors for an engine, in the order of the protocol; those made for it are closed with `opened`.

        Raises:
            OSError: when there are too many open files.
        """
        index = self._index_read_only()
        opened.callback(os.close, index)
        lock = self._processes.open_lock(process)
        opened.callback(os.close, lock)
        return [index, self._arena.data.descriptor, process.ledger.descriptor, self.loop.doorbell, lock]

    def _serve(self, connection: Connection, process: ClientProcess) -> None:
        """From here on the hot thread reads this engine's socket."""
        handed_over = connection.hand_over()
        name = self.loop.add(handed_over[0], process.number, handed_over[1]) if handed_over else 0
        if name:
            self._served[name] = process
            process.connections.add(name)
        else:
            self._processes.lost_connection(process)

    def _on_notices(self) -> None:
        for notice in self.loop.notices():
            process = self._served.get(notice.connection)
            if notice.payload is None:
                self._malformed_total += notice.is_malformed
                self._on_served_closed(notice.connection)
            elif process is not None:
                process.has_spoken = True
                if notice.message == Message.BYE:
                    process.connections.discard(notice.connection)  # closed once the answer is sent
                self.loop.send(notice.connection, self._reply(process, notice))
                if process not in self._processes:
                    self._served.pop(notice.connection, None)
                    self.loop.close_connection(notice.connection)

    def _on_served_closed(self, name: int) -> None:
        process = self._served.pop(name, None)
        if process is None:
            return
        # Not the end of its pins: a copy may still run. The pidfd says when the process is gone.
        process.connections.discard(name)
        self._processes.lost_connection(process)

    def _reply(self, process: ClientProcess, notice: Notice) -> bytes:
        """The frame that answers a request of an engine."""
        frame = Frame(notice.message, Kind.REQUEST, notice.request_id, notice.payload or b"")
        try:
            return encode(frame.message, Kind.ANSWER, frame.request_id, self._answer(process, frame))
        except Exception as error:
            return encode(frame.message, Kind.ERROR, frame.request_id, self._refusal(error))

    def _index_read_only(self) -> int:
        """A descriptor that cannot be mapped writable: only the daemon writes the index."""
        return os.open(self._arena.index.path, os.O_RDONLY | os.O_CLOEXEC)

    def _resume(self, connection: Connection, request: dict[str, object]) -> ClientProcess | None:
        if request.get("instance") != self.instance.hex():
            return None
        return self._processes.resume(
            request.get("client"), request.get("token"), request.get("writing"), connection.received
        )

    def _admit(self, connection: Connection, request: dict[str, object]) -> ClientProcess:
        name, pid = str(request.get("name", "?")), int(str(request.get("pid", 0)))
        return self._processes.admit(connection.received, name, pid)

    def _close_connections(self, process: ClientProcess) -> None:
        """Close them at once: what is still to be read from them is not answered any more."""
        while process.connections:
            name = process.connections.pop()
            self._served.pop(name, None)
            self.loop.close_connection(name)

    # ---- requests ----

    def _answer(self, process: ClientProcess | None, frame: Frame) -> bytes:
        """Answer what the hot thread does not. `process` is None for an observer."""
        match frame.message:
            case Message.STATUS:
                return protocol.encode_json(self._status(frame.payload))
            case Message.DROP:
                return self._drop(protocol.decode_json(frame.payload))
            case Message.LIST:
                return protocol.encode_json(self._list(protocol.decode_json(frame.payload)))
            case Message.RETAIN:
                return protocol.encode_json(self._retain(protocol.decode_json(frame.payload)))
        if process is None:
            raise RefusedError("say HELLO as an engine first")
        match frame.message:
            case Message.HELLO:
                raise RefusedError("HELLO was said already")
            case Message.OPEN:
                return self._open(process, protocol.decode_json(frame.payload))
            case Message.VERIFY:
                return self._verify(frame.payload)
            case Message.BYE:
                self._processes.forget(process)
                return b""
        raise RefusedError(f"unknown message type {frame.message}; this is infera-kvd {VERSION}")

    def _open(self, process: ClientProcess, request: dict[str, object]) -> bytes:
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
        class_id = self.store.open_class(digest, group, shard_bytes, model)
        if class_id not in self._classes:
            log.info("new class id=%d namespace=%s group=%d model=%s", class_id, namespace, group, model)
            self._classes[class_id] = ClassName(namespace, group, model)
        stock = request.get("stock")
        if isinstance(stock, dict):
            shard, count = stock.get("shard"), stock.get("count")
            if type(shard) is not int or not 0 <= shard < len(shard_bytes) or type(count) is not int or count < 1:
                raise RefusedError("stock needs the number of a shard and a count")
            with self.loop:
                self.loop.want_stock(process.number, class_id, shard, min(count, STOCK_MAX))
        return protocol.encode_json({"class_id": class_id})

    def _verify(self, payload: bytes) -> bytes:
        (class_id,) = protocol.TOUCH_HEAD.unpack_from(payload)
        keys = payload[protocol.TOUCH_HEAD.size :]
        _check_batch(keys, 16)
        if len(keys) // 16 > protocol.VERIFY_BATCH_MAX:
            raise ProtocolError(f"VERIFY takes at most {protocol.VERIFY_BATCH_MAX} records")
        if damaged := self.store.verify(self._arena.data.memory, class_id, keys):
            log.warning("dropped %d damaged records of class %d: something wrote over them", damaged, class_id)
        return damaged.to_bytes(4, "little")

    def _drop(self, request: dict[str, object]) -> bytes:
        matching = self._classes_of(request.get("namespace"))
        return protocol.encode_json({"dropped": sum(self.store.drop_class(number) for number in matching)})

    def _list(self, request: dict[str, object]) -> dict[str, object]:
        """A page of a namespace's records."""
        matching = self._classes_of(request.get("namespace"))
        cursor, limit = request.get("cursor", 0), request.get("limit", protocol.LIST_RECORDS_MAX)
        if type(cursor) is not int or not 0 <= cursor < 2**63 or type(limit) is not int or limit < 1:
            raise RefusedError("LIST takes a cursor and a limit, both whole numbers")
        records, following = self.store.listing(matching, cursor, min(limit, protocol.LIST_RECORDS_MAX))
        return {"records": [listed(record, self._classes) for record in records], "next": following}

    def _retain(self, request: dict[str, object]) -> dict[str, object]:
        """Give a namespace's present records, or one of them (`key`), another retention class."""
        matching = self._classes_of(request.get("namespace"))
        retention, key = str(request.get("retention")), request.get("key")
        number = retention_number(retention)
        if number == RETENTIONS["none"]:
            raise RefusedError("records that are present cannot become `none`; drop them instead")
        chosen = None if key is None else bytes.fromhex(str(key))
        changed = sum(self.store.set_retention(class_id, chosen, number) for class_id in matching)
        return {"changed": changed, "retention": retention}

    def _classes_of(self, namespace: object) -> list[int]:
        """Class ids of a namespace, one a group."""
        matching = [number for number, name in self._classes.items() if name.namespace == namespace]
        if not matching:
            known = ", ".join(sorted({name.namespace for name in self._classes.values()})) or "none"
            raise RefusedError(f"no such namespace; known: {known}")
        return matching

    # ---- events, deadlines, facts ----

    def _gather_events(self) -> None:
        """Events wait: publish them in a moment, with those that come meanwhile."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.loop.events_descriptor)
        self._gathering = loop.call_later(EVENT_GATHER_S, self._gathered)

    def _gathered(self) -> None:
        self._flush_events()
        asyncio.get_running_loop().add_reader(self.loop.events_descriptor, self._gather_events)

    def _flush_events(self) -> None:
        self.loop.events_taken()
        events, some_were_lost = self.store.take_events()
        self.events.publish(events, some_were_lost=some_were_lost)

    def _exact_snapshot(self) -> list[StoreEvent]:
        with self.loop:  # nothing may happen between what is published and what is listed
            self._flush_events()
            return self.store.snapshot()

    def _status(self, payload: bytes) -> dict[str, object]:
        """`describe`, and on demand `audit`: null when all books add up. That walks every record."""
        wanted = protocol.decode_json(payload) if payload else {}
        return self.describe() | ({"audit": self.store.audit()} if wanted.get("audit") else {})

    def metrics(self) -> dict[str, int]:
        """All counters and gauges by name."""
        return (
            self.store.stats()
            | self.loop.stats()
            | {
                "connections": len(self._connections) + len(self._served),
                "malformed_frames_total": self._malformed_total,
                "refused_peers_total": self._refused_peers_total,
                "event_sequence": self.events.sequence,
                "snapshots_total": self.events.snapshots_total,
                "replays_total": self.events.replays_total,
            }
        )

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
                | self.store.class_facts(number)
                for number, name in self._classes.items()
            ],
            "clients": [
                {
                    "number": process.number,
                    "name": process.name,
                    "pid": process.pid,
                    "connections": len(process.connections),
                }
                for process in self._processes
            ],
            "tenants": [
                {"tag": f"{usage.tag:016x}", "bytes": usage.size_bytes, "records": usage.records}
                | ({"is_overflow": True} if usage.is_overflow else {})
                for usage in self.store.tenants()
            ],
            "metrics": self.metrics(),
        }


def _hello_answer(frame: Frame, answer: dict[str, object]) -> bytes:
    return encode(Message.HELLO, Kind.ANSWER, frame.request_id, protocol.encode_json(answer))


def _check_batch(entries: bytes, entry_bytes: int) -> None:
    if len(entries) % entry_bytes or not 0 < len(entries) // entry_bytes <= protocol.BATCH_MAX:
        raise ProtocolError(f"a batch holds 1 to {protocol.BATCH_MAX} entries of {entry_bytes} bytes")
