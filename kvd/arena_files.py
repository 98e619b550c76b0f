"""The arena's files: one folder, one owner, checked before anything is mapped.

The folder lies on tmpfs or hugetlbfs. A lock file makes one writer. The files stay when a daemon ends, for the next
one (see `kvd/arena_start.py`). Removing them is always safe, because clients keep their own mappings.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from infera_core import ffi, lib

from kvd.memory_limits import memory_room_bytes

PREFAULT_CHUNK_BYTES = 64 << 20
PREFAULT_THREADS_MAX = 8
PROGRESS_INTERVAL_S = 2.0
FREE_MARGIN_BYTES = 64 << 20
"""Left free on the file system, so that ledgers of clients always fit."""

_ARENA_FILE = re.compile(r"[0-9a-f]{12}\.(?:index|data)|[0-9a-f]{16}\.ledger")
"""Names of files made here. Nothing else is ever removed."""

log = logging.getLogger("kvd")


class ArenaFolderError(Exception):
    """The arena cannot be made here; the text says what is missing and what helps."""


@dataclass
class MappedFile:
    """An arena file of fixed size, mapped shared and writable. It has no name once `unlink`ed."""

    path: Path
    descriptor: int
    memory: mmap.mmap

    @property
    def size_bytes(self) -> int:
        """Length of the file and of the mapping."""
        return len(self.memory)

    def close(self, *, keep: bool = False) -> None:
        """Unmap and close the file; without `keep`, remove it too. Clients keep what they have mapped."""
        self.memory.close()
        os.close(self.descriptor)
        if not keep:
            self.path.unlink(missing_ok=True)


class ArenaFolder:
    """The folder with its lock held.

    Raises:
        ArenaFolderError: when it cannot be made or another daemon owns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_is_ours(path)
            os.chmod(path, 0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaFolderError(f"cannot use {path}: {error.strerror}; choose another folder with --path") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ArenaFolderError(
                f"another infera-kvd (pid {owner}) owns {path}; stop it or choose another folder with --path"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def files(self, suffix: str) -> list[Path]:
        """Arena files of one kind."""
        return sorted(
            path for path in self.path.iterdir() if path.suffix == suffix and _ARENA_FILE.fullmatch(path.name)
        )

    def remove_left_overs(self, kept: Collection[Path] = ()) -> int:
        """Remove all arena files but those `kept`; returns their number of bytes."""
        freed_bytes = 0
        for path in self.path.iterdir():
            if _ARENA_FILE.fullmatch(path.name) and path not in kept:
                freed_bytes += path.lstat().st_size
                path.unlink()
        return freed_bytes

    def open(self, path: Path) -> MappedFile:
        """Map a file that is there.

        Raises:
            FileNotFoundError: when it is not.
            ValueError: when it is empty.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return MappedFile(path, descriptor, mmap.mmap(descriptor, 0))
        except BaseException:
            os.close(descriptor)
            raise

    def check_room(self, needed_bytes: int) -> None:
        """Check the file system and the memory cgroup.

        Raises:
            ArenaFolderError: when fewer than `needed_bytes` can be had, with the cure.
        """
        file_system = os.statvfs(self.path)
        free_bytes = file_system.f_bavail * file_system.f_frsize - FREE_MARGIN_BYTES
        if needed_bytes > free_bytes:
            raise ArenaFolderError(
                f"{self.path} has room for {max(free_bytes, 0) >> 20} MiB, {needed_bytes >> 20} MiB are needed; lower "
                "--memory, or enlarge the file system (docker: --shm-size; mount: remount with size=)"
            )
        limit_bytes = memory_room_bytes()
        if limit_bytes is not None and needed_bytes > limit_bytes:
            raise ArenaFolderError(
                f"this process may use {max(limit_bytes, 0) >> 20} MiB more memory (cgroup limit), "
                f"{needed_bytes >> 20} MiB are needed; lower --memory or raise the container's memory limit"
            )

    def create(self, name: str, size_bytes: int) -> MappedFile:
        """Make a file of zeroes with all its blocks allocated, and map it.

        Raises:
            ArenaFolderError: when the file system has no room.
        """
        path = self.path / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return MappedFile(path, descriptor, mmap.mmap(descriptor, size_bytes))
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ArenaFolderError(f"{self.path} has no room for {size_bytes >> 20} MiB; lower --memory") from error
            raise

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._lock)


def _check_is_ours(path: Path) -> None:
    """See that a folder is this user's and holds nothing but an arena: it is locked up and cleaned.

    Raises:
        ArenaFolderError: when it is not.
    """
    if path.stat().st_uid != os.getuid():
        raise ArenaFolderError(f"{path} belongs to user {path.stat().st_uid}; choose another folder with --path")
    for entry in path.iterdir():
        if entry.name != "lock" and not _ARENA_FILE.fullmatch(entry.name):
            raise ArenaFolderError(
                f"{path} holds {entry.name}, which is not infera-kvd's; name a folder of its own with --path"
            )


def prefault(memory: mmap.mmap, threads: int, *, is_quiet: bool = False) -> None:
    """Make every page present, in parallel, with a progress line every two seconds.

    Raises:
        ArenaFolderError: when the memory is not there after all.
    """
    view = ffi.from_buffer(memory, require_writable=True)
    total = len(memory)
    started_s = time.monotonic()
    done_bytes = 0
    failure = 0
    lock = threading.Lock()
    next_offset = 0

    def work() -> None:
        nonlocal next_offset, done_bytes, failure
        while not failure:
            with lock:
                offset, next_offset = next_offset, next_offset + PREFAULT_CHUNK_BYTES
            if offset >= total:
                return
            size = min(PREFAULT_CHUNK_BYTES, total - offset)
            error = lib.memory_prefault(view + offset, size)
            with lock:
                failure = failure or error
                done_bytes += size

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, PREFAULT_THREADS_MAX))]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            worker.join(PROGRESS_INTERVAL_S)
            if worker.is_alive():
                log.info("prefaulting arena: %d of %d MiB", done_bytes >> 20, total >> 20)
    ffi.release(view)
    if failure:
        raise ArenaFolderError(f"memory for the arena is not there ({os.strerror(failure)}); lower --memory")
    if not is_quiet:
        log.info("prefaulted %d MiB in %.1f s", total >> 20, time.monotonic() - started_s)


def lock_in_memory(memory: mmap.mmap) -> str | None:
    """Keep the arena from being swapped; returns None, or why that was refused and what helps."""
    view = ffi.from_buffer(memory, require_writable=True)
    error = 0
    for offset in range(0, len(memory), PREFAULT_CHUNK_BYTES):
        # In pieces: while one is entered, no other thread can change this process's mappings.
        error = error or lib.memory_lock(view + offset, min(PREFAULT_CHUNK_BYTES, len(memory) - offset))
    ffi.release(view)
    if not error:
        return None
    return f"{os.strerror(error)}; raise the limit (ulimit -l unlimited, docker: --ulimit memlock=-1)"
