"""What control groups allow, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from kvd.memory_limits import memory_room_bytes, small_pages_reason

GIB = 1 << 30


def group_v2(folder: Path, limit: str, used: int, *, file: int = 0, shmem: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nshmem {shmem}\n")


def room(folder: Path, groups: str) -> int | None:
    (folder / "cgroup").write_text(groups)
    return memory_room_bytes(folder / "cgroup", folder)


def test_version_2(tmp_path: Path) -> None:
    group_v2(tmp_path / "a/b", str(4 * GIB), GIB)
    assert room(tmp_path, "0::/a/b\n") == 3 * GIB


def test_no_limit_is_none(tmp_path: Path) -> None:
    group_v2(tmp_path / "a", "max", GIB)
    assert room(tmp_path, "0::/a\n") is None
    assert room(tmp_path, "") is None
    assert memory_room_bytes(tmp_path / "missing", tmp_path) is None


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    group_v2(tmp_path / "slice/unit", "max", GIB)
    group_v2(tmp_path / "slice", str(2 * GIB), GIB + 5)
    group_v2(tmp_path, str(16 * GIB), GIB)
    assert room(tmp_path, "0::/slice/unit\n") == GIB - 5


def test_cached_files_count_as_free_but_shared_memory_does_not(tmp_path: Path) -> None:
    group_v2(tmp_path / "a", str(4 * GIB), 4 * GIB, file=3 * GIB, shmem=GIB)
    assert room(tmp_path, "0::/a\n") == 2 * GIB


def test_in_a_container_whose_path_is_the_hosts_the_root_counts(tmp_path: Path) -> None:
    group_v2(tmp_path, str(GIB), 0)
    assert room(tmp_path, "0::/docker/0123\n") == GIB


def test_over_the_limit_is_negative(tmp_path: Path) -> None:
    group_v2(tmp_path, str(GIB), 2 * GIB)
    assert room(tmp_path, "0::/\n") == -GIB


def test_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"cache 5\ntotal_cache {GIB // 2}\ntotal_shmem 0\n")
    assert room(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n") == GIB + GIB // 2


def test_damaged_files_are_no_limit(tmp_path: Path) -> None:
    group_v2(tmp_path / "a", "soon", 1)
    (tmp_path / "a/memory.stat").write_text("one two three\n")
    assert room(tmp_path, "nonsense\n0::/a\n") is None


def test_the_machine_this_runs_on() -> None:
    found = memory_room_bytes()
    assert found is None or found > 0


MOUNTS = """proc /proc proc rw 0 0
tmpfs /dev/shm tmpfs rw,nosuid 0 0
tmpfs /mnt/huge\\040pages tmpfs rw,huge=within_size 0 0
none /dev/hugepages hugetlbfs rw,pagesize=2M 0 0
"""


def test_small_pages_are_said_with_the_cure() -> None:
    assert small_pages_reason(Path("/mnt/huge pages/kvd"), MOUNTS) is None
    assert small_pages_reason(Path("/dev/hugepages/kvd"), MOUNTS) is None
    reason = small_pages_reason(Path("/dev/shm/kvd"), MOUNTS)
    assert reason is not None
    assert "/dev/shm (tmpfs)" in reason
    assert "huge=within_size" in reason
