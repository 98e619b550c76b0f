"""Client processes: who may hold pins and space, and when that ends.

A client ends with its process, not with a socket. This daemon learns of the end through a pidfd that the client sent.
The next daemon has none: it tells who lives by the lock that each client holds on its ledger, and watches those locks
until the client says HELLO again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvd.arena_files import ArenaFolder, MappedFile
from kvd.loop import Loop
from kvd.protocol import RefusedError
from kvd.store import Store, StoreRefusedError

LOCK_POLL_INTERVAL_S = 0.5
NAME_BYTES_MAX = 47

log = logging.getLogger("kvd")


@dataclass(eq=False)
class ClientProcess:
    """A process that may hold pins and reservations."""

    number: int
    name: str
    pid: int
    token: int
    ledger: MappedFile
    pidfd: int | None
    """None: taken over from an earlier daemon and not heard of since."""
    connections: set[int] = field(default_factory=set)
    has_spoken: bool = False
    """Whether it has sent anything after HELLO: before that it cannot know its ledger or hold a pin."""


class ClientProcesses:
    """The processes of one daemon, by number.

    `close_connections` closes those of a process, when it is forgotten or has come back on a new one.
    """

    def __init__(
        self, folder: ArenaFolder, store: Store, loop: Loop, ledger_bytes: int,
        close_connections: Callable[[ClientProcess], None],
    ) -> None:  # fmt: skip
        self._folder = folder
        self._store = store
        self._loop = loop
        self._ledger_bytes = ledger_bytes
        self._close_connections = close_connections
        self._by_number: dict[int, ClientProcess] = {}
        self._next_poll: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[ClientProcess]:
        return iter([self._by_number[number] for number in sorted(self._by_number)])

    def __contains__(self, process: ClientProcess) -> bool:
        return self._by_number.get(process.number) is process

    def admit(self, received: list[int], name: str, pid: int) -> ClientProcess:
        """Register a new client. `received` are descriptors it sent; its pidfd is taken from them.

        Raises:
            RefusedError: when it sent no pidfd.
            StoreRefusedError: when there are too many clients.
        """
        if not received or not is_pidfd(received[0]):
            raise RefusedError("a client must send a pidfd of itself with HELLO")
        name = name.encode(errors="replace")[:NAME_BYTES_MAX].decode(errors="ignore")
        token = secrets.randbits(63)
        ledger = self._folder.create(f"{secrets.token_hex(8)}.ledger", self._ledger_bytes)
        try:
            number = self._store.attach(ledger.memory, token)
        except StoreRefusedError:
            ledger.close()
            raise
        self._store.describe_client(number, pid, name)
        process = ClientProcess(number, name, pid, token, ledger, None)
        self._by_number[number] = process
        self._watch(process, received.pop(0))
        log.info("client joined number=%d name=%s pid=%d", number, name, pid)
        return process

    def adopt(self, number: int, ledger: MappedFile) -> None:
        """Take over a client that the store has adopted; its lock says that it lives."""
        facts = self._store.read_client(number)
        process = ClientProcess(number, facts.name, facts.pid, facts.token, ledger, None, has_spoken=True)
        self._by_number[number] = process
        log.info("client taken over number=%d name=%s pid=%d", number, facts.name, facts.pid)
        self._poll_later()

    def resume(self, number: object, token: object, writing: object, received: list[int]) -> ClientProcess | None:
        """The process of an earlier connection, when it proves to be the same.

        `writing` lists the reservations it still writes to. The rest is free: an earlier daemon granted them, or the
        answer never reached the client, or its word that it had finished never came here. What an older connection
        still holds would be granted to nobody, so those are closed.
        """
        process = self._by_number.get(number) if isinstance(number, int) else None
        if process is None or process.token != token:
            return None
        if process.pidfd is None and received and is_pidfd(received[0]):
            self._watch(process, received.pop(0))
            log.info("client resumed number=%d name=%s pid=%d", process.number, process.name, process.pid)
        if isinstance(writing, list) and all(type(name) is int and 0 <= name < 2**64 for name in writing):
            self._close_connections(process)
            self._store.resume(process.number, b"".join(name.to_bytes(8, "little") for name in writing))
        return process

    def lost_connection(self, process: ClientProcess) -> None:
        """Forget a process without a connection that does not know its ledger: it gave up before our answer to HELLO
        came, and will start as a new client. Who has locked its ledger knows it, and may read without a word to us."""
        if process.connections or process.has_spoken or process not in self:
            return
        if is_locked(process.ledger.descriptor):
            self._poll_later()
        else:
            self.forget(process)

    def forget(self, process: ClientProcess) -> None:
        """The process is gone, or says so: free all it held."""
        self._unwatch(process)
        with self._loop:
            self._loop.drain_client(process.number)
            self._store.detach(process.number)
        process.ledger.close()
        del self._by_number[process.number]
        self._close_connections(process)

    def close(self, *, keep_files: bool) -> None:
        """Let go of all. With `keep_files`, what live clients hold stays noted in their ledgers for the next daemon.

        The store is closed by then.
        """
        if self._next_poll:
            self._next_poll.cancel()
        for process in self:
            self._unwatch(process)
            process.ledger.close(keep=keep_files)
        self._by_number.clear()

    def open_lock(self, process: ClientProcess) -> int:
        """A descriptor of the ledger for its client to lock: of an open file of its own, because locks belong to
        those. To be closed here once it was sent."""
        return os.open(process.ledger.path, os.O_RDWR | os.O_CLOEXEC)

    def _watch(self, process: ClientProcess, pidfd: int) -> None:
        process.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, process)

    def _unwatch(self, process: ClientProcess) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None

    def _ended(self, process: ClientProcess) -> None:
        log.info("client ended number=%d name=%s pid=%d", process.number, process.name, process.pid)
        self.forget(process)

    def _poll_later(self) -> None:
        if self._next_poll is None:
            self._next_poll = asyncio.get_running_loop().call_later(LOCK_POLL_INTERVAL_S, self._poll_locks)

    def _poll_locks(self) -> None:
        self._next_poll = None
        for process in self:
            if process.pidfd is None or not (process.connections or process.has_spoken):
                if is_locked(process.ledger.descriptor):
                    self._poll_later()
                else:
                    self._ended(process)


def is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock on a file; if not, this descriptor has it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_pidfd(descriptor: int) -> bool:
    """Whether a descriptor stands for a process: only then it says when that is gone."""
    try:
        return "\nPid:" in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:
        return False
