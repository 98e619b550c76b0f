"""`infera-kvd check`: finds every flipped byte that matters, takes bad records out, and leaves the rest served."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvd import disk_format
from kvd.cli import main
from kvd.disk_check import CheckError, check
from kvd.disk_store import DiskStatus
from tests.support.disk_user import SEGMENT_BYTES, DiskUser

LENGTH = 50_000
RECORDS = 50
UNITS = 1 + -(-LENGTH // 4096)


def filled(folder: Path) -> Path:
    """A store with two full segments and a tail."""
    with DiskUser(folder) as user:
        user.wait_until_on()
        for number in range(RECORDS):
            user.put(number, LENGTH)
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_good_store_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "a")
    assert main(["check", str(tmp_path / "a"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["bad"], facts["object_bytes"]) == (RECORDS, {}, RECORDS * LENGTH)
    assert main(["check", str(tmp_path / "a")]) == 0
    assert "nothing is wrong with it" in capsys.readouterr().out


def test_bad_bytes_are_named_and_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = filled(tmp_path / "a")
    for number in range(3):  # the second record of each segment: two with a table, one without
        flip(folder / f"{number:08}.segment", (1 + UNITS + 1) * 4096 + 17)
    assert main(["check", str(folder)]) == 1
    said = capsys.readouterr().out
    assert said.count("bytes do not match their checksum") == 3
    assert "--drop" in said
    assert main(["check", str(folder), "--drop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == 3
    assert check(folder, drop=False).records == RECORDS - 3
    with DiskUser(folder) as user:
        assert user.store.stats()["loaded_total"] == RECORDS - 3
        assert sum(user.serves(number, LENGTH) for number in range(RECORDS)) == RECORDS - 3
        assert user.store.stats()["damaged_total"] == 0
        user.wait_until_on()
        assert {user.put(number, LENGTH) for number in range(RECORDS)} == {DiskStatus.OK, DiskStatus.EXISTS}
        assert all(user.serves(number, LENGTH) for number in range(RECORDS))


def test_a_bad_head_table_and_segment(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a")
    flip(folder / "00000000.segment", 4096 + 80)  # a head
    table = int.from_bytes((folder / "00000001.segment").read_bytes()[-4096 + 40 : -4096 + 48], "little")
    flip(folder / "00000001.segment", table + 9)
    flip(folder / "00000002.segment", 20)  # its header
    report = check(folder, drop=False)
    assert dict(report.bad) == {"record": 1, "table": 1, "segment": 1}
    assert check(folder, drop=True).is_clean
    assert check(folder, drop=False).bad == {}
    with DiskUser(folder) as user:
        stats = user.store.stats()
        assert stats["load_segments_damaged_total"] == stats["load_tables_damaged_total"] == 0
        assert stats["loaded_total"] == report.records


def test_the_daemon_serves_what_the_check_calls_good(tmp_path: Path) -> None:
    """Random damage anywhere: both readers agree, and no byte served is wrong."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    folder = filled(tmp_path / "a")
    segments = sorted(folder.glob("*.segment"))
    originals = {path: path.read_bytes() for path in segments}
    for _ in range(12):
        for path, content in originals.items():
            path.write_bytes(content)
        for _ in range(dice.randrange(1, 12)):
            flip(dice.choice(segments), dice.randrange(SEGMENT_BYTES))
        report = check(folder, drop=False)
        with DiskUser(folder) as user:
            served = sum(user.serves(number, LENGTH) for number in range(RECORDS))
            assert served == report.records
            counted = user.store.stats()
            assert counted["damaged_total"] == report.bad["record"]
            assert counted["load_segments_damaged_total"] == report.bad["segment"]
            assert counted["load_tables_damaged_total"] == report.bad["table"]


def test_swapped_and_cut_files(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a")
    first, second = folder / "00000000.segment", folder / "00000001.segment"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with (folder / "00000002.segment").open("r+b") as file:
        file.truncate(70_000)
    report = check(folder, drop=False)
    assert report.bad["segment"] == 3
    assert "renamed or swapped" in report.findings[0]
    with DiskUser(folder) as user:
        assert user.store.stats()["load_segments_damaged_total"] == 3
        assert not any(user.serves(number, LENGTH) for number in range(RECORDS))


def test_vllm_55904_a_store_of_another_version_is_not_read(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a")
    block = bytearray((folder / "format").read_bytes())
    block[8:12] = (2).to_bytes(4, "little")
    block[-4:] = disk_format.crc32c(bytes(block[:-4])).to_bytes(4, "little")
    (folder / "format").write_bytes(block)
    with pytest.raises(CheckError, match="format version 2"):
        check(folder, drop=True)
    with DiskUser(folder) as user:
        assert "format version 2" in user.store.devices()[0].reason
        assert not any(user.serves(number, LENGTH) for number in range(RECORDS))
    assert (folder / "format").read_bytes() == block


def test_a_store_in_use_and_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is no disk store" in capsys.readouterr().err
    with DiskUser(tmp_path / "a"):
        assert main(["check", str(tmp_path / "a")]) == 2
        assert "stop it first" in capsys.readouterr().err
