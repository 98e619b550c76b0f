"""How a daemon comes by its arena: the one an earlier daemon left, or a new one.

What was left is taken over when its header verifies and its size is what was asked for. Anything else is said in one
line and removed, which harms nobody: clients keep their own mappings.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvd.arena_files import ArenaFolder, ArenaFolderError, MappedFile, lock_in_memory, prefault
from kvd.memory_limits import small_pages_reason
from kvd.processes import is_locked
from kvd.store import RECORDS_MAX, ArenaFacts, Store, index_bytes, ledger_bytes, read_facts, record_capacity

RECORD_BYTES_EXPECTED = 32 * 1024
"""Sizes the index: one record for every so many bytes of memory."""
RECORDS_MIN = 1024

log = logging.getLogger("kvd")


@dataclass(frozen=True)
class Geometry:
    """Sizes of an arena; `records` is what the index has room for."""

    data_bytes: int
    records: int
    shards_max: int

    @classmethod
    def of(cls, memory_bytes: int, records: int | None, shards_max: int) -> Geometry:
        """What a user asked for.

        Raises:
            ArenaFolderError: when that are more records than an index may have.
        """
        data_bytes = memory_bytes // 4096 * 4096
        wanted = records or max(RECORDS_MIN, data_bytes // RECORD_BYTES_EXPECTED)
        if wanted > RECORDS_MAX:
            cure = "lower --records" if records else "lower --memory, or name fewer --records"
            raise ArenaFolderError(f"{wanted} records; an index has at most {RECORDS_MAX}, {cure}")
        return cls(data_bytes, record_capacity(wanted), shards_max)

    @property
    def index_bytes(self) -> int:
        """Length of the index file."""
        return index_bytes(self.records, self.shards_max, self.data_bytes)

    @property
    def ledger_bytes(self) -> int:
        """Length of a client's ledger file."""
        return ledger_bytes(self.records)

    def __str__(self) -> str:
        return f"{self.data_bytes >> 20} MiB, {self.records} records of {self.shards_max} shards"


@dataclass
class Arena:
    """Files and store of a daemon. `clients` are numbers and ledgers of processes that outlived the one before."""

    instance: bytes
    generation: int
    index: MappedFile
    data: MappedFile
    store: Store
    is_adopted: bool
    clients: list[tuple[int, MappedFile]] = field(default_factory=list)

    def close(self, *, keep: bool) -> None:
        """Close the store and unmap the files; without `keep`, remove them too."""
        self.store.close()
        self.index.close(keep=keep)
        self.data.close(keep=keep)


def start_arena(folder: ArenaFolder, wanted: Geometry, *, with_prefault: bool) -> Arena:
    """Adopt what the folder holds, or begin anew.

    Raises:
        ArenaFolderError: when the memory for a new arena cannot be had.
    """
    started_s = time.monotonic()
    arena = _adopt(folder, wanted)
    if arena is None:
        if freed_bytes := folder.remove_left_overs():
            log.info("removed %d MiB of an earlier arena", freed_bytes >> 20)
        return _begin(folder, wanted, with_prefault)
    stats = arena.store.stats()
    log.info(
        "adopted the arena in %s: records=%d dropped=%d clients=%d seconds=%.2f", folder.path, stats["adopted_total"],
        sum(count for name, count in stats.items() if name.startswith("adopt_dropped_")), len(arena.clients),
        time.monotonic() - started_s,
    )  # fmt: skip
    return arena


def _begin(folder: ArenaFolder, wanted: Geometry, with_prefault: bool) -> Arena:
    """A new arena. Its header is written last: what a kill leaves before that is never taken for an arena."""
    folder.check_room(wanted.data_bytes + wanted.index_bytes)
    instance, generation = secrets.token_bytes(16), time.time_ns()
    stem = instance.hex()[:12]
    index = folder.create(f"{stem}.index", wanted.index_bytes)
    try:
        data = folder.create(f"{stem}.data", wanted.data_bytes)
        try:
            if with_prefault:
                prefault(data.memory, os.cpu_count() or 1)
            prefault(index.memory, 1)
            if reason := small_pages_reason(folder.path.resolve(), Path("/proc/self/mounts").read_text()):
                log.info("no huge pages: %s", reason)
            if refusal := lock_in_memory(data.memory):
                log.warning("arena is not locked in memory and may be swapped: %s", refusal)
            store = Store(
                index.memory, instance=instance, generation=generation, records=wanted.records,
                shards_max=wanted.shards_max, data_bytes=wanted.data_bytes,
                seed=(secrets.randbits(64), secrets.randbits(64)),
            )  # fmt: skip
        except BaseException:
            data.close()
            raise
    except BaseException:
        index.close()
        raise
    return Arena(instance, generation, index, data, store, is_adopted=False)


def _adopt(folder: ArenaFolder, wanted: Geometry) -> Arena | None:
    """The arena that is there, if it can be used as it is; else None, with a line that says why."""
    found: tuple[ArenaFacts, MappedFile, MappedFile] | None = None
    for path in folder.files(".index"):
        opened = _open_pair(folder, path, wanted)
        if opened is None:
            continue
        facts, index, data = opened
        if found is not None:  # a daemon was killed between making a new arena and removing the old one
            older, newer = sorted((found, opened), key=lambda one: one[0].generation)
            older[1].close()
            older[2].close()
            found = newer
        else:
            found = facts, index, data
    if found is None:
        return None
    facts, index, data = found
    ledgers = live_ledgers(folder)
    folder.remove_left_overs({file.path for file in (index, data, *ledgers)})
    prefault(index.memory, 1, is_quiet=True)  # its pages exist: this only enters them in our page tables
    store, numbers = Store.adopt(index.memory, wanted.data_bytes, [ledger.memory for ledger in ledgers])
    clients = []
    for number, ledger in zip(numbers, ledgers, strict=True):
        if number is None:
            log.warning("%s is no ledger of this arena; removed", ledger.path.name)
            ledger.close()
        else:
            clients.append((number, ledger))
    return Arena(facts.instance, facts.generation, index, data, store, True, clients)


def _open_pair(folder: ArenaFolder, path: Path, wanted: Geometry) -> tuple[ArenaFacts, MappedFile, MappedFile] | None:
    """Index and data of an arena that can be used as it is, else None after saying why not."""
    data_path = path.with_suffix(".data")
    files: list[MappedFile] = []
    facts: ArenaFacts | None = None
    try:
        files = [folder.open(path), folder.open(data_path)]
        refusal, facts = read_facts(files[0].memory, files[1].size_bytes)
    except FileNotFoundError:
        refusal = "its data file is missing"
    except ValueError:
        refusal = "it was never finished"  # an empty file cannot be mapped
    if refusal is None and facts is not None:
        there = Geometry(facts.data_bytes, facts.records, facts.shards_max)
        if there == wanted and files[1].size_bytes == wanted.data_bytes:
            return facts, files[0], files[1]
        refusal = f"it has {there}, asked for are {wanted}"
    log.warning("the arena %s in %s cannot be used: %s; beginning a new one", path.stem, folder.path, refusal)
    for file in files:
        file.close()
    return None


def live_ledgers(folder: ArenaFolder) -> list[MappedFile]:
    """Ledgers that a process has locked; those of the dead are removed."""
    live = []
    for path in folder.files(".ledger"):
        try:
            ledger = folder.open(path)
        except ValueError:  # empty: made in the moment of the kill
            path.unlink()
            continue
        if is_locked(ledger.descriptor):
            live.append(ledger)
        else:
            ledger.close()
    return live
