"""The client's mapped arena: what it was given is closed again, whether it could be used or not."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest

from kvd.client.arena import Arena, ArenaError
from kvd.store import Store, index_bytes, ledger_bytes

RECORDS, SHARDS, DATA_BYTES = 64, 1, 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> list[int]:
    """Index, data, ledger, doorbell and lock, as a daemon sends them; to be closed by whoever takes them."""
    sizes = {
        "index": index_bytes(RECORDS, SHARDS, DATA_BYTES), "data": DATA_BYTES, "ledger": ledger_bytes(RECORDS)
    }  # fmt: skip
    opened = []
    for name, size in sizes.items():
        opened.append(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
        os.ftruncate(opened[-1], size)
    index, ledger = mmap.mmap(opened[0], 0), mmap.mmap(opened[2], 0)
    store = Store(
        index, instance=bytes(16), generation=1, records=RECORDS, shards_max=SHARDS, data_bytes=DATA_BYTES, seed=(1, 2)
    )
    store.attach(ledger, 7)
    store.close()
    index.close()
    ledger.close()
    return [*opened, os.eventfd(0), os.open(tmp_path / "ledger", os.O_RDWR)]


def are_closed(files: list[int], folder: Path) -> bool:
    """Whether this process has none of them open any more, under whatever number."""
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append((int(number), os.readlink(f"/proc/self/fd/{number}")))
    bells = [number for number, link in links if number in files and "eventfd" in link]
    return not bells and not any(link.startswith(str(folder)) for _, link in links)


def test_everything_is_closed_when_the_arena_goes(files: list[int], tmp_path: Path) -> None:
    arena = Arena("instance", *files)
    bell = os.eventfd(0)
    arena.take_doorbell(bell)
    assert not are_closed(files, tmp_path)
    del arena
    assert are_closed([*files, bell], tmp_path)


def test_everything_is_closed_when_a_header_is_refused(files: list[int], tmp_path: Path) -> None:
    """The client tries again twice a second, for hours if need be."""
    os.pwrite(files[0], b"nonsense", 0)
    with pytest.raises(ArenaError, match="not an arena"):
        Arena("instance", *files)
    assert are_closed(files, tmp_path)


def test_everything_is_closed_when_a_file_is_empty(files: list[int], tmp_path: Path) -> None:
    os.ftruncate(files[1], 0)
    with pytest.raises(ValueError, match="empty"):
        Arena("instance", *files)
    assert are_closed(files, tmp_path)


def test_everything_is_closed_when_somebody_else_has_the_lock(files: list[int], tmp_path: Path) -> None:
    with (tmp_path / "ledger").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            Arena("instance", *files)
    assert are_closed(files, tmp_path)


def test_the_lock_is_free_before_the_refusal_is_known(files: list[int], tmp_path: Path) -> None:
    """The daemon takes a locked ledger for one in use; it looks when the connection closes, which comes next."""
    os.pwrite(files[0], b"nonsense", 0)
    try:
        Arena("instance", *files)
    except ArenaError:  # while the exception still holds on to the object
        with (tmp_path / "ledger").open() as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
