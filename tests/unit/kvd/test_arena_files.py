"""The arena's folder: one owner, nothing of others touched, and room checked first."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.arena_files import ArenaFolder, ArenaFolderError, lock_in_memory, prefault


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder on tmpfs."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as made:
        yield Path(made) / "arena"


def test_files_are_full_length_zeroed_and_private(folder: Path) -> None:
    arena = ArenaFolder(folder)
    file = arena.create("00aa00aa00aa.data", 1 << 20)
    assert file.size_bytes == 1 << 20
    assert file.path.stat().st_blocks * 512 >= 1 << 20  # allocated, so that no later touch can fail
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(file.memory[:4096])
    prefault(file.memory, 2)
    file.memory[:5] = b"hello"
    prefault(file.memory, 2)
    assert file.memory[:5] == b"hello"
    assert lock_in_memory(file.memory) is None or "ulimit -l" in str(lock_in_memory(file.memory))
    file.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    arena.close()


def test_a_second_owner_is_refused_with_the_first_ones_pid(folder: Path) -> None:
    arena = ArenaFolder(folder)
    with pytest.raises(ArenaFolderError, match=rf"another infera-kvd \(pid {os.getpid()}\).*--path"):
        ArenaFolder(folder)
    arena.close()
    ArenaFolder(folder).close()


def _take_and_die(folder: Path) -> None:
    ArenaFolder(folder).create("00aa00aa00aa.data", 8192)
    os._exit(9)


def test_a_killed_owner_leaves_the_lock_free_and_files_that_are_removed(folder: Path) -> None:
    """vllm#51579: what a killed process left must not fill the memory for ever."""
    process = multiprocessing.get_context("spawn").Process(target=_take_and_die, args=(folder,))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    (folder / "0123456789abcdef.ledger").write_bytes(bytes(100))
    (folder / "00aa00aa00aa.index").write_bytes(bytes(10))
    arena = ArenaFolder(folder)
    assert arena.remove_left_overs() == 8192 + 110
    assert [path.name for path in folder.iterdir()] == ["lock"]
    arena.close()


@pytest.mark.parametrize("name", ["model.data", "notes.txt", "00aa00aa00aa.data.bak", "x.index"])
def test_a_folder_with_other_files_is_refused_and_left_as_it_is(folder: Path, name: str) -> None:
    folder.mkdir(mode=0o755)
    (folder / name).write_text("precious")
    with pytest.raises(ArenaFolderError, match=rf"{name}.*--path"):
        ArenaFolder(folder)
    assert (folder / name).read_text() == "precious"
    assert folder.stat().st_mode & 0o777 == 0o755


def test_files_that_appear_later_are_not_removed(folder: Path) -> None:
    arena = ArenaFolder(folder)
    (folder / "mine.data").write_text("precious")
    assert arena.remove_left_overs() == 0
    assert (folder / "mine.data").exists()
    arena.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(ArenaFolderError, match=r"belongs to user 12345.*--path"):
        ArenaFolder(folder)


@pytest.mark.parametrize("path", ["/proc/nowhere/arena", "/dev/null/arena"])
def test_an_impossible_folder_is_refused_in_words(path: str) -> None:
    with pytest.raises(ArenaFolderError, match=r"cannot use .*--path"):
        ArenaFolder(Path(path))


def test_no_room_on_the_file_system_is_said_with_the_cure(folder: Path) -> None:
    arena = ArenaFolder(folder)
    arena.check_room(1 << 20)
    with pytest.raises(ArenaFolderError, match=r"has room for \d+ MiB, \d+ MiB are needed; lower --memory.*--shm-size"):
        arena.check_room(1 << 60)
    with pytest.raises((ArenaFolderError, OSError)):
        arena.create("00aa00aa00aa.data", 1 << 50)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    arena.close()


def test_no_room_in_the_control_group_is_said_with_the_cure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.arena_files.memory_room_bytes", lambda: 5 << 20)
    arena = ArenaFolder(folder)
    with pytest.raises(ArenaFolderError, match=r"may use 5 MiB more memory \(cgroup limit\), 6 MiB are needed"):
        arena.check_room(6 << 20)
    arena.check_room(5 << 20)
    arena.close()
