"""What a folder lies on, and what that means for a disk tier: looked at, not guessed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NFS_SIZE_BYTES_MIN = 256 << 10
MEMORY_KINDS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
NETWORK_KINDS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.glusterfs", "9p", "lustre", "gpfs", "beegfs"}
LAYERED_KINDS = {"overlay", "aufs"}


@dataclass(frozen=True)
class Storage:
    """`kind` is one of nvme, ssd, hdd, virtual, memory, network, overlay, unknown; `warnings` end with a cure."""

    path: str
    mount: str
    file_system: str
    device: str
    kind: str
    detail: str
    warnings: tuple[str, ...]

    def describe(self) -> str:
        """One line for a person."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path} is on {self.kind}: {self.file_system} on {self.device}{detail}"


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo."""

    device_number: str
    mount: str
    file_system: str
    source: str
    options: tuple[str, ...]


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of `/proc/self/mountinfo`; the format is in proc(5)."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        options = (*fields[5].split(","), *rest[2].split(","))
        mounts.append(Mount(fields[2], _unescaped(fields[4]), rest[0], _unescaped(rest[1]), options))
    return mounts


def _unescaped(field: str) -> str:
    """Spaces and the like are written as octal numbers there."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def look(path: Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Storage:
    """Look at what a folder, or the nearest one above it that exists, lies on.

    Raises:
        OSError: when the system does not say.
    """
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    place = place.resolve()
    mounts = parse_mounts((proc / "self" / "mountinfo").read_text())
    mount = _mount_of(place, mounts)
    if mount is None:
        return Storage(str(path), "?", "?", "?", "unknown", "no mount is known for it", ())
    kind, detail = _kind_of(mount, sys)
    return Storage(
        str(path), mount.mount, mount.file_system, mount.source, kind, detail, _warnings(mount, kind, str(path))
    )


def _mount_of(place: Path, mounts: list[Mount]) -> Mount | None:
    """The last one mounted over the longest part of the path."""
    best: Mount | None = None
    for mount in mounts:
        is_above = place == Path(mount.mount) or Path(mount.mount) in place.parents
        if is_above and (best is None or len(mount.mount) >= len(best.mount)):
            best = mount
    return best


def _kind_of(mount: Mount, sys: Path) -> tuple[str, str]:
    if mount.file_system in MEMORY_KINDS:
        return "memory", ""
    if mount.file_system in NETWORK_KINDS:
        sizes = [option for option in mount.options if option.startswith(("rsize=", "wsize=", "vers="))]
        return "network", " ".join(dict.fromkeys(sizes))
    if mount.file_system in LAYERED_KINDS:
        return "overlay", "the writable layer of a container"
    return _block_kind(mount.device_number, sys)


def _block_kind(device_number: str, sys: Path) -> tuple[str, str]:
    folder = sys / "dev" / "block" / device_number
    if not folder.exists():
        return "unknown", ""
    folder = folder.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    name = folder.name
    slaves = sorted(os.listdir(folder / "slaves")) if (folder / "slaves").is_dir() else []
    if slaves:
        return _by_name(slaves[0], sys / "class" / "block" / slaves[0], f"{name} over {', '.join(slaves)}")
    return _by_name(name, folder, _text(folder / "device" / "model"))


def _by_name(name: str, folder: Path, detail: str) -> tuple[str, str]:
    if name.startswith(("zram", "ram")):
        return "memory", name
    if name.startswith(("vd", "xvd", "nbd", "rbd")):
        return "virtual", detail or name
    if name.startswith("nvme"):
        return "nvme", detail
    return ("hdd" if _text(folder / "queue" / "rotational") == "1" else "ssd"), detail


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _warnings(mount: Mount, kind: str, path: str) -> tuple[str, ...]:
    found = []
    if kind == "memory":
        found.append(
            f"{path} is in memory ({mount.file_system}): nothing stays over a reboot and it competes with the arena; "
            "name a folder on a disk, or give the memory to --memory"
        )
    if kind == "overlay":
        found.append(
            f"{path} is in a container's writable layer: slow, and gone with the container; mount a volume there "
            "(docker: -v /mnt/nvme/kvd:/kvd)"
        )
    for name in ("wsize", "rsize"):
        size = next((int(option[6:]) for option in mount.options if option.startswith(f"{name}=")), None)
        if kind == "network" and size is not None and size < NFS_SIZE_BYTES_MIN:
            found.append(
                f"{path} is mounted with {name}={size}: every block becomes many small requests; remount it with "
                f"{name}=1048576"
            )
    if kind == "network" and "soft" in mount.options:
        found.append(f"{path} is mounted soft: errors come back as lost writes; remount it hard")
    if kind == "hdd":
        found.append(f"{path} is on a rotating disk: reading blocks back may be slower than computing them; use an SSD")
    if "ro" in mount.options:
        found.append(f"{path} is mounted read-only: nothing new is kept; remount it read-write")
    return tuple(found)
