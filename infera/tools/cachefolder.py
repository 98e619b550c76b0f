"""The user's cache folder: where it is, locks in it, and names made from what they were built of."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infera.tools.errors import ToolError
from infera.tools.progress import Progress

LOCK_WAIT_LIMIT_S = 45 * 60.0
LOCK_POLL_S = 0.25
DIGEST_NAME_LETTERS = 16


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The cache folder: INFERA_CACHE_DIR, or `infera` below XDG_CACHE_HOME, or `~/.cache/infera`."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get("INFERA_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "infera"


def digest_of(parts: Iterable[bytes]) -> str:
    """A short hexadecimal name for a sequence of byte strings; their borders count."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:DIGEST_NAME_LETTERS]


@contextlib.contextmanager
def file_lock(path: Path, what: str, limit_s: float = LOCK_WAIT_LIMIT_S) -> Iterator[None]:
    """Holds an exclusive lock on a file while the block runs; the kernel frees it when its owner dies.

    Says what it waits for. Raises ToolError when the lock is not free within `limit_s` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        progress = Progress(f"waiting for another process that is {what}")
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress.elapsed_s >= limit_s:
                    raise ToolError(
                        f"another process has been {what} for more than {limit_s:.0f} s; "
                        f"see who holds the lock with: fuser {path}"
                    ) from None
                progress.tick()
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
