"""How much memory this process may still use, as its control groups say (version 2 and 1)."""

from __future__ import annotations

from pathlib import Path

PROCESS_GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def memory_room_bytes(process_groups: Path = PROCESS_GROUPS, mount: Path = MOUNT) -> int | None:
    """Return what the tightest limit on the way up to the root still allows, or None without a limit.

    Memory that holds cached files counts as free, because the kernel takes it back first. The result
    is negative when a group is over its limit already.
    """
    try:
        lines = process_groups.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            rooms += _rooms_of_group(mount, group, "memory.max", "memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            rooms += _rooms_of_group(
                mount / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"
            )
    return min(rooms, default=None)


def _rooms_of_group(root: Path, group: str, limit: str, usage: str, cached: str, shared: str) -> list[int]:
    """Room under each limit from a group up. In a container the path may be the host's: then the root counts."""
    rooms: list[int] = []
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        try:
            limit_text = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit_text.isdecimal():
            reclaimable = int(facts.get(cached, 0)) - int(facts.get(shared, 0))
            rooms.append(int(limit_text) - used + max(reclaimable, 0))
    return rooms


def small_pages_reason(folder: Path, mounts: str) -> str | None:
    """Why files in `folder` get no huge pages and what helps; None when they can. `mounts` is the text of
    /proc/self/mounts."""
    best, kind, options = Path("/"), "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = Path(fields[1].encode().decode("unicode_escape"))
        if folder.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind, options = point, fields[2], fields[3]
    if kind == "hugetlbfs" or any(f"huge={how}" in options for how in ("always", "within_size")):
        return None
    return f"{best} ({kind or 'unknown'}) has small pages; mount a tmpfs with huge=within_size and name it with --path"
