"""What a LoRA adapter is: a digest of its weights and configuration, so that the same name with other weights is
another adapter, and the same weights under two names are one.

Used by the engine plugin for keys and by the agent for the worker record, so it needs the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
OTHER_FILES: Final = ("new_embeddings.safetensors", "new_embeddings.bin")
DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 4 << 20
REMEMBERED_MAX: Final = 256
"""Adapters whose digests are remembered, and as many that wait to be read."""

AdapterStamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size in bytes and time of the last change in ns of every file that makes the adapter."""


AdapterContent = tuple[Path, AdapterStamp]


class AdapterError(Exception):
    """The adapter's files cannot be read, so nothing says what it is."""


def adapter_folder(path: str) -> Path:
    """The folder an engine means by an adapter's path."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def adapter_stamp(folder: Path) -> AdapterStamp:
    """What tells, without reading the files, that they are still the same.

    Raises:
        AdapterError: when the folder holds no adapter, or it cannot be looked at.
    """
    found = []
    for name in (CONFIG_FILE, *WEIGHT_FILES, *OTHER_FILES):
        try:
            status = os.stat(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise AdapterError(f"{folder / name} cannot be read: {error}") from error
        if stat.S_ISREG(status.st_mode):
            found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    names = {entry[0] for entry in found}
    if CONFIG_FILE not in names or names.isdisjoint(WEIGHT_FILES):
        raise AdapterError(
            f"{folder} holds no {CONFIG_FILE} with weights beside it; give the engine the path of the folder itself"
        )
    return tuple(found)


def read_digest(folder: Path, stamp: AdapterStamp) -> bytes:
    """16 bytes that name the content of the files that `stamp` was taken of. Reads them whole.

    Raises:
        AdapterError: when a file cannot be read, or changed since `stamp` was taken or while it was read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"infera-adapter")
    try:
        for name, _, size, _ in stamp:
            digest.update(f"{name}\0{size}\0".encode())
            with (folder / name).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error}") from error
    if adapter_stamp(folder) != stamp:
        raise AdapterError(f"{folder} is being written to")
    return digest.digest()


class DigestReader:
    """Reads adapters one after the other in a thread, so that nobody waits for files. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: OrderedDict[AdapterContent, None] = OrderedDict()
        self._found: OrderedDict[AdapterContent, bytes | AdapterError] = OrderedDict()
        self._thread: threading.Thread | None = None

    def find(self, content: AdapterContent) -> bytes | None:
        """The digest of a folder's files as they were at that stamp; None while it is being read: ask again.

        Raises:
            AdapterError: when they could not be read; asking again tries again.
        """
        with self._lock:
            found = self._found.get(content)
            if isinstance(found, bytes):
                self._found.move_to_end(content)
                return found
            if found is not None:
                del self._found[content]
                raise found
            if len(self._wanted) < REMEMBERED_MAX:
                self._wanted[content] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infera-adapters", daemon=True)
                self._thread.start()
            return None

    def wait(self, timeout_s: float) -> None:
        """Wait until everything that was asked for has been read."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                content = next(iter(self._wanted), None)
                if content is None:
                    self._thread = None
                    return
            found: bytes | AdapterError
            try:
                found = read_digest(*content)
            except AdapterError as error:
                found = error
            with self._lock:
                del self._wanted[content]
                self._found[content] = found
                if len(self._found) > REMEMBERED_MAX:
                    self._found.popitem(last=False)
