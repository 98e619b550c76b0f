"""The client an engine plugin uses. While the daemon is away everything is a miss, and nothing waits."""

from __future__ import annotations

import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infera_core import lib

from kvd import protocol
from kvd.client.arena import KEY_BYTES, Arena, ArenaError, PutFacts
from kvd.client.connection import ClientConnection, UnavailableError
from kvd.client.copier import CpuCopier
from kvd.protocol import Message, ProtocolError, RefusedError
from kvd.retention import retention_number

RECONNECT_INTERVAL_S = 0.5
CALL_TIMEOUT_S = 0.5
"""A daemon that does not answer a save for so long is treated as gone."""
STOCK_COUNT = 64
"""Extents a saving process asks to have reserved ahead."""
TOUCHES_SAMPLED = 256
"""Records of one chain that `touch` tells of in one call."""
PUT_FACTS_MAX = 64
"""Kinds of puts whose C structs are kept."""
NOTICES_MAX = 256
"""Hits and damage waiting to be told; the oldest is forgotten first, which costs accuracy, not bytes."""

log = logging.getLogger("infera.kvd")


@dataclass(frozen=True)
class RecordSpec:
    """What one (namespace, group) stores: the bytes of each rank's shard of one record."""

    namespace: bytes
    group: int
    shard_bytes: tuple[int, ...]
    model: str
    _hash: int = field(init=False, repr=False, compare=False)
    """Worked out once: every look-up and every put finds its class by the spec."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.namespace, self.group, self.shard_bytes, self.model)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def full_mask(self) -> int:
        """Bit mask of all shards."""
        return (1 << len(self.shard_bytes)) - 1


@dataclass(frozen=True)
class Grant:
    """Space reserved for one shard. Commit it or give it up."""

    reservation: int
    address: int
    position: int
    """Which of the wished keys this is for."""
    arena: Arena = field(repr=False, compare=False)
    """Keeps the memory at `address` mapped, also when the daemon restarts during the copy."""


@dataclass(frozen=True)
class Session:
    """One life of the connection. Valid to read from even after the daemon is gone."""

    arena: Arena
    class_ids: dict[RecordSpec, int]


class PinnedRun:
    """Consecutive records pinned for one load; `release` gives all pins back, once."""

    def __init__(self, arena: Arena, slots: list[int]) -> None:
        self.arena = arena
        self.slots = slots
        self._released = False
        self._pid = os.getpid()

    def release(self) -> None:
        """Give the pins back. More calls do nothing, nor does one in a forked child: they are its parent's."""
        if not self._released and os.getpid() == self._pid:
            self._released = True
            for slot in self.slots:
                self.arena.unpin(slot)


class KvdClient:
    """Connection to the daemon of this host, kept up by a background thread.

    `session()` is the current life or None; methods that need the daemon return "nothing" without it.
    Look-ups and pins may be called from any thread; saves from one thread at a time. A process that
    saves names the shard it saves, so that the daemon keeps space ready for it.
    """

    def __init__(
        self, socket_path: Path, name: str, specs: Sequence[RecordSpec], saves_shard: int | None = None
    ) -> None:
        self._saves_shard = saves_shard
        self._path = socket_path
        self._name = name
        self._specs = list(specs)
        self._pid = os.getpid()
        self._session: Session | None = None
        self._connection: ClientConnection | None = None
        self._resume: dict[str, Any] | None = None
        self._arena: Arena | None = None
        self._writing: set[int] = set()
        """Reservations of `_arena` granted and not finished: a daemon started anew keeps off their space."""
        self._call_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._put_facts: dict[tuple[RecordSpec, int, int, str, int, int], tuple[CpuCopier, PutFacts]] = {}
        self._said_unavailable = ""
        self._notices: collections.deque[tuple[Message, RecordSpec, bytes]] = collections.deque(maxlen=NOTICES_MAX)
        self.connects_total = 0
        self._thread = threading.Thread(target=_keep_connected, args=(weakref.ref(self),), daemon=True)
        self._thread.name = "infera-kvd-client"

    def start(self) -> None:
        """Connect once now, so that a daemon which is there is used from the first request on."""
        self._connect()
        self._thread.start()

    def session(self) -> Session | None:
        """The current life, or None: daemon away, or this is a forked child, which is not a client."""
        return self._session if os.getpid() == self._pid else None

    def set_specs(self, specs: Sequence[RecordSpec]) -> None:
        """Store under other specs from now on. Until the daemon knows them everything under them is a miss."""
        self._specs = list(specs)
        self._wake.set()

    def close(self) -> None:
        """Leave. The caller has released its pins and finished its copies."""
        if os.getpid() != self._pid:
            return
        self._stopping = True
        self._wake.set()
        self._call(Message.BYE, b"")
        with self._call_lock:
            self._disconnect("")
            # Its lock on the ledger ends with the last pin or grant: a daemon that comes back need not keep it.
            self._arena = self._resume = None

    # ---- reading ----

    def probe_run(self, spec: RecordSpec, keys: bytes) -> int:
        """Number of leading keys present with all shards; 0 without a daemon."""
        session = self.session()
        if session is None or not keys or spec not in session.class_ids:
            return 0
        return session.arena.probe_run(session.class_ids[spec], spec.full_mask, keys)

    def pin_run(self, spec: RecordSpec, keys: bytes) -> PinnedRun | None:
        """Pin the leading records of `keys`, as many as are (still) present; None for none."""
        session = self.session()
        if session is None or spec not in session.class_ids:
            return None
        slots = session.arena.pin_run(session.class_ids[spec], spec.full_mask, keys)
        if not slots:
            return None
        session.arena.touch(session.class_ids[spec], keys[: len(slots) * KEY_BYTES])
        return PinnedRun(session.arena, slots)

    def touch(self, spec: RecordSpec, keys: bytes) -> int:
        """Tell that records of one chain were useful without being read here, such as those an engine's own
        cache on the device had; else the daemon takes them for unused and evicts them first. Cheap enough for
        every request: no system call, no wait. Returns how many were told.

        Of a long chain only `TOUCHES_SAMPLED` are, others each time. None are without a daemon, or when word
        of more uses waits than the daemon has taken in: it learns of them the next time.

        Raises:
            ValueError: when `keys` is not a whole number of keys.
        """
        if len(keys) % KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes each; {len(keys)} bytes are not a whole number of them")
        session = self.session()
        if session is None or spec not in session.class_ids:
            return 0
        return session.arena.touch(session.class_ids[spec], keys, TOUCHES_SAMPLED, rings=False)

    def report_damaged(self, spec: RecordSpec, keys: bytes) -> None:
        """Have the daemon check records whose bytes were wrong, and drop them, so that the next request
        does not run into them again. Release their pins first."""
        step = protocol.VERIFY_BATCH_MAX * KEY_BYTES
        for start in range(0, len(keys), step):
            self._notify(Message.VERIFY, spec, keys[start : start + step])

    def _notify(self, message: Message, spec: RecordSpec, keys: bytes) -> None:
        """Leave something for the background thread to tell the daemon; never waits."""
        self._notices.append((message, spec, keys))
        self._wake.set()

    # ---- writing ----

    def reserve(
        self, spec: RecordSpec, shard: int, keys: Sequence[bytes], depths_grains: Sequence[int], *,
        retention: str = "short", ttl_s: int | None = None, tenant_tag: int = 0,
    ) -> list[Grant]:  # fmt: skip
        """Reserve space for one shard of each record, in chain order; only what was granted is returned.

        Keys that exist, are being written by somebody else, find no room or may not be kept are left
        out: all of them mean "do not save this". The records are worth keeping as `retention` says
        (see `kvd.retention`), for at most `ttl_s` seconds, on account of a tenant.
        """
        session = self.session()
        if session is None or not keys or spec not in session.class_ids:
            return []
        arena = session.arena
        class_id = session.class_ids[spec]
        head = protocol.RESERVE_HEAD.pack(class_id, shard, retention_number(retention), tenant_tag, ttl_s or 0, 0)
        wishes = [protocol.WISH.pack(key, depth, 0) for key, depth in zip(keys, depths_grains, strict=True)]
        grants: list[Grant] = []
        for start in range(0, len(wishes), protocol.BATCH_MAX):
            batch = head + b"".join(wishes[start : start + protocol.BATCH_MAX])
            answer = self._call(Message.RESERVE, batch, arena, self._begin_writing)
            if answer is None:
                break
            grants += [
                Grant(reservation, arena.data_address + offset, position, arena)
                for position, (reservation, offset, status, _) in enumerate(protocol.GRANT.iter_unpack(answer), start)
                if status == lib.STORE_OK
            ]
        return grants

    def put(
        self, spec: RecordSpec, shard: int, keys: bytes, depths_grains: Sequence[int], copier: CpuCopier,
        block_ids: Sequence[int], *, retention: str = "short", ttl_s: int | None = None, tenant_tag: int = 0,
    ) -> int:  # fmt: skip
        """Save one shard of each record: copy the blocks and publish them; returns how many were saved.

        Takes space reserved ahead and does not wait for the daemon as long as there is some; asks over
        the socket for the rest. `keys` has 16 bytes a block.

        Raises:
            ValueError: when the copier's blocks are not as large as a shard.
        """
        terms: dict[str, Any] = {"retention": retention, "ttl_s": ttl_s, "tenant_tag": tenant_tag}
        saved = self.put_ready(spec, shard, keys, depths_grains, copier, block_ids, **terms)
        if saved == len(block_ids):
            return saved
        rest = [keys[start : start + KEY_BYTES] for start in range(saved * KEY_BYTES, len(keys), KEY_BYTES)]
        grants = self.reserve(spec, shard, rest, depths_grains[saved:], **terms)
        blocks = block_ids[saved:]
        sums = copier.save([blocks[grant.position] for grant in grants], [grant.address for grant in grants])
        return saved + self.commit(grants, sums)

    def put_ready(
        self, spec: RecordSpec, shard: int, keys: bytes, depths_grains: Sequence[int], copier: CpuCopier,
        block_ids: Sequence[int], *, retention: str = "short", ttl_s: int | None = None, tenant_tag: int = 0,
    ) -> int:  # fmt: skip
        """Like `put`, but only as many of the leading blocks as there is space reserved ahead for: it never waits.

        Raises:
            ValueError: when the copier's blocks are not as large as a shard.
        """
        session = self.session()
        if session is None or not block_ids or spec not in session.class_ids:
            return 0
        facts = self._facts_for(session, spec, shard, copier, (retention, ttl_s or 0, tenant_tag))
        return session.arena.put(facts, keys, depths_grains, block_ids)

    def _facts_for(
        self, session: Session, spec: RecordSpec, shard: int, copier: CpuCopier, terms: tuple[str, int, int]
    ) -> PutFacts:
        """The facts of an earlier put that was like this one, which there nearly always is."""
        name = (spec, shard, session.class_ids[spec], *terms)
        known = self._put_facts.get(name)
        if known is not None and known[0] is copier:
            return known[1]
        if copier.object_bytes != spec.shard_bytes[shard]:
            raise ValueError(
                f"the copier moves {copier.object_bytes} bytes a block; a shard has {spec.shard_bytes[shard]} bytes"
            )
        retention, ttl_s, tenant_tag = terms
        facts = PutFacts(
            session.class_ids[spec], shard, copier.segments, flags=retention_number(retention), ttl_s=ttl_s,
            tenant_tag=tenant_tag,
        )  # fmt: skip
        if len(self._put_facts) >= PUT_FACTS_MAX:
            self._put_facts.clear()
        self._put_facts[name] = (copier, facts)
        return facts

    def commit(self, grants: Sequence[Grant], sums: Sequence[int]) -> int:
        """Publish shards whose bytes are in place; returns how many were accepted.

        All grants come from one `reserve`; what an earlier daemon granted is not accepted.
        """
        entries = [protocol.COMMITMENT.pack(g.reservation, s) for g, s in zip(grants, sums, strict=True)]
        self._end_writing(grants)
        accepted = 0
        for start in range(0, len(entries), protocol.BATCH_MAX):
            batch = b"".join(entries[start : start + protocol.BATCH_MAX])
            answer = self._call(Message.COMMIT, batch, grants[0].arena)
            if answer is None:
                break
            accepted += sum(status == lib.STORE_OK for (status,) in protocol.STATUS_CODE.iter_unpack(answer))
        return accepted

    def give_up(self, grants: Sequence[Grant]) -> None:
        """Return reservations unused. All come from one `reserve`."""
        self._end_writing(grants)
        for start in range(0, len(grants), protocol.BATCH_MAX):
            batch = grants[start : start + protocol.BATCH_MAX]
            names = b"".join(grant.reservation.to_bytes(8, "little") for grant in batch)
            self._call(Message.GIVE_UP, names, grants[0].arena)

    def _begin_writing(self, answer: bytes) -> None:
        granted = protocol.GRANT.iter_unpack(answer)
        self._writing.update(reservation for reservation, _, status, _ in granted if status == lib.STORE_OK)

    def _end_writing(self, grants: Sequence[Grant]) -> None:
        """The copies into these grants are over, whatever becomes of them."""
        if os.getpid() != self._pid:
            return
        with self._call_lock:
            self._writing.difference_update(grant.reservation for grant in grants if grant.arena is self._arena)

    # ---- connection ----

    def _call(
        self, message: Message, payload: bytes, arena: Arena | None = None,
        on_answer: Callable[[bytes], None] | None = None,
    ) -> bytes | None:  # fmt: skip
        """Ask the daemon; None when it cannot or will not. With `arena`, only the daemon it belongs to is
        asked: another one's class and reservation numbers mean something else. `on_answer` is called before
        anything else can happen on the connection."""
        if os.getpid() != self._pid:
            return None
        with self._call_lock:
            connection, session = self._connection, self._session
            if connection is None or session is None or (arena is not None and session.arena is not arena):
                return None
            try:
                answer = connection.call(message, payload)
                if on_answer:
                    on_answer(answer)
                return answer
            except RefusedError as error:
                log.warning("infera-kvd refused %s: %s", message.name, error)
                return None
            except UnavailableError as error:
                self._disconnect(str(error))
                return None

    def _connect(self) -> None:
        try:
            connection = ClientConnection.open(self._path, CALL_TIMEOUT_S)
            try:
                self._begin_session(connection)
            except BaseException:
                connection.close()
                raise
        except (UnavailableError, RefusedError, ArenaError, OSError) as error:
            self._say_once(str(error))
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            self._say_once(f"what infera-kvd at {self._path} says of itself is not understood: {error!r}")

    def _begin_session(self, connection: ClientConnection) -> None:
        arena = self._introduce(connection)
        session = Session(arena, {})
        for spec in self._specs:
            opened = protocol.decode_json(connection.call(Message.OPEN, self._open_request(spec)))
            session.class_ids[spec] = int(opened["class_id"])
        with self._call_lock:
            if self._stopping:
                raise UnavailableError("the client was closed while it connected")
            self._connection = connection
            self._session = session
        self._said_unavailable = ""
        self.connects_total += 1
        log.info("connected to infera-kvd at %s (instance %s)", self._path, arena.instance)

    def _open_request(self, spec: RecordSpec) -> bytes:
        request: dict[str, Any] = {
            "namespace": spec.namespace.hex(),
            "group": spec.group,
            "model": spec.model,
            "shard_bytes": list(spec.shard_bytes),
        }
        if self._saves_shard is not None:
            request["stock"] = {"shard": self._saves_shard, "count": STOCK_COUNT}
        return protocol.encode_json(request)

    def _open_new_specs(self, session: Session) -> None:
        """Make the daemon know the specs that `set_specs` named since this session began."""
        for spec in self._specs:
            if spec in session.class_ids:
                continue
            answer = self._call(Message.OPEN, self._open_request(spec), session.arena)
            if answer is not None:
                session.class_ids[spec] = int(protocol.decode_json(answer)["class_id"])

    def _introduce(self, connection: ClientConnection) -> Arena:
        """Say HELLO. A daemon that knows this process from before goes on with the same ledger.

        The identity is kept at once, also when what follows is refused: every HELLO without it would
        make one more client of this process.
        """
        with self._call_lock:
            writing = sorted(self._writing)
        facts, descriptors = connection.hello(self._name, self._resume and {**self._resume, "writing": writing})
        identity = {key: facts.get(key) for key in ("instance", "client", "token")}
        if self._arena is not None and identity == self._resume:
            for descriptor in (*descriptors[:3], descriptors[4]):
                os.close(descriptor)
            self._arena.take_doorbell(descriptors[3])
            return self._arena
        arena = Arena(str(identity["instance"]), *descriptors)
        with self._call_lock:
            self._arena = arena
            self._writing.clear()
        self._resume = identity
        self._arena.populate_in_background()
        return self._arena

    def _disconnect(self, reason: str) -> None:
        self._session = None
        self._put_facts = {}
        connection, self._connection = self._connection, None
        if connection:
            connection.close()
        if reason:
            self._say_once(reason)
        self._wake.set()

    def _say_once(self, reason: str) -> None:
        """One line for a daemon that stays away, not one for every try."""
        if not self._said_unavailable:
            log.warning("going on without infera-kvd, retrying: %s", reason)
        self._said_unavailable = reason

    def _tend(self) -> None:
        """One round of the background thread: notice a dead daemon, reconnect, pass on notices."""
        connection = self._connection
        if connection is None:
            self._connect()
            return
        with self._call_lock:  # else a call could close the socket meanwhile
            if self._connection is connection and connection.has_hung_up():
                self._disconnect("infera-kvd went away")
                return
        if self._session is not None:
            self._open_new_specs(self._session)
        while self._notices:
            message, spec, keys = self._notices.popleft()
            session = self._session
            if session is not None and spec in session.class_ids:
                head = protocol.TOUCH_HEAD.pack(session.class_ids[spec])
                self._call(message, head + keys[: protocol.BATCH_MAX * KEY_BYTES], session.arena)


def _keep_connected(reference: weakref.ref[KvdClient]) -> None:
    """Body of the background thread; ends when the client is closed or garbage."""
    while (client := reference()) is not None and not client._stopping:
        try:
            client._tend()
        except Exception:
            log.exception("infera-kvd client: unexpected error, trying again")
        wake = client._wake
        del client
        wake.wait(RECONNECT_INTERVAL_S)
        wake.clear()
