"""What a path lies on is read from the system, and a bad choice is warned about with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.storage_look import look, parse_mounts

ROOT = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


def machine(tmp_path: Path, mounts: str, blocks: dict[str, dict[str, str]] | None = None) -> dict[str, Path]:
    """Fake /proc and /sys; `blocks` maps a device number to {"name": ..., file: text}."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(mounts)
    (sys / "dev" / "block").mkdir(parents=True)
    for number, files in (blocks or {}).items():
        folder = sys / "devices" / files["name"]
        for name, text in files.items():
            if name != "name":
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        (sys / "dev" / "block" / number).symlink_to(folder)
    return {"proc": proc, "sys": sys}


@pytest.mark.parametrize(
    ("files", "kind", "detail"),
    [
        ({"name": "nvme0n1", "device/model": "Fast 990", "queue/rotational": "0"}, "nvme", "Fast 990"),
        ({"name": "sda", "device/model": "Spinner", "queue/rotational": "1"}, "hdd", "Spinner"),
        ({"name": "sdb", "device/model": "Flash", "queue/rotational": "0"}, "ssd", "Flash"),
        ({"name": "vda"}, "virtual", "vda"),
        ({"name": "zram0"}, "memory", "zram0"),
        ({"name": "nvme1n1/nvme1n1p2", "partition": "2"}, "nvme", ""),
    ],
)
def test_block_devices(tmp_path: Path, files: dict[str, str], kind: str, detail: str) -> None:
    fake = machine(tmp_path, ROOT, {"254:0": files})
    storage = look(tmp_path, **fake)
    assert (storage.kind, storage.detail, storage.file_system) == (kind, detail, "ext4")


@pytest.mark.parametrize(
    ("line", "kind", "warning"),
    [
        ("40 22 0:31 / /m rw - tmpfs tmpfs rw", "memory", "--memory"),
        ("40 22 0:31 / /m rw - overlay overlay rw,upperdir=/u", "overlay", "mount a volume"),
        ("40 22 0:31 / /m rw - nfs4 srv:/x rw,rsize=1048576,wsize=32768,hard", "network", "wsize=1048576"),
        ("40 22 0:31 / /m rw - nfs4 srv:/x rw,rsize=1048576,wsize=1048576,soft", "network", "remount it hard"),
        ("40 22 254:0 / /m ro - ext4 /dev/vdb ro", "unknown", "read-write"),
    ],
)
def test_bad_choices_are_warned_about(tmp_path: Path, line: str, kind: str, warning: str) -> None:
    fake = machine(tmp_path, f"{ROOT}\n{line}")
    storage = look(Path("/m"), **fake)
    if not Path("/m").exists():  # the nearest folder above is looked at: let that be /m
        fake = machine(tmp_path / "again", line.replace(" /m ", " / "))
        storage = look(Path("/m"), **fake)
    assert storage.kind == kind
    assert any(warning in text for text in storage.warnings), storage.warnings


def test_a_good_network_mount_is_not_warned_about(tmp_path: Path) -> None:
    fake = machine(tmp_path, "40 22 0:31 / / rw - nfs4 srv:/x rw,rsize=1048576,wsize=1048576,hard")
    assert look(tmp_path, **fake).warnings == ()


def test_the_longest_mount_counts_and_names_may_hold_spaces(tmp_path: Path) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    fake = machine(tmp_path, f"{ROOT}\n41 22 0:40 / {escaped} rw - tmpfs tmpfs rw")
    assert look(place, **fake).kind == "memory"
    assert look(tmp_path, **fake).file_system == "ext4"


def test_half_a_line_is_passed_over() -> None:
    assert len(parse_mounts(f"nonsense\n{ROOT}\n1 2 3 - x")) == 1


def test_this_machine(tmp_path: Path) -> None:
    assert look(tmp_path / "not" / "there").describe().startswith(str(tmp_path))
