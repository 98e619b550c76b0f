"""docs/kvd-store.md says what is so: its tables equal the structs, and the second reader's layouts do too."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from infera_core import ffi, lib

from kvd import disk_format

PAGE = (Path(__file__).parents[3] / "docs" / "kvd-store.md").read_text()
STRUCTS = {
    "disk_format_block": disk_format.FORMAT,
    "disk_marks_block": disk_format.MARKS,
    "disk_drop_row": disk_format.DROP_ROW,
    "disk_segment_block": disk_format.SEGMENT,
    "disk_record_block": disk_format.RECORD,
    "disk_class_row": disk_format.CLASS_ROW,
    "disk_record_row": disk_format.RECORD_ROW,
    "disk_trailer_block": disk_format.TRAILER,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_the_table_of(name: str) -> None:
    found = re.search(rf"^`{name}`, (\d+) bytes:\n\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    assert found, f"docs/kvd-store.md has no table of {name}"
    assert int(found[1]) == ffi.sizeof(name)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| \S.* \|$", found[2], re.M)
    fields = [(field.offset, ffi.sizeof(field.type), what) for what, field in ffi.typeof(name).fields]
    assert [(int(offset), int(size), what) for offset, size, what in rows] == fields


@pytest.mark.parametrize(("name", "layout"), STRUCTS.items())
def test_the_second_readers_layout_of(name: str, layout: struct.Struct) -> None:
    assert layout.size == ffi.sizeof(name)
    sizes = [ffi.sizeof(field.type) for _, field in ffi.typeof(name).fields]
    codes = re.findall(r"(\d*)([sIHBQ])", layout.format.replace("<", ""))
    flat = [
        size
        for count, code in codes
        for size in ([int(count)] if code == "s" else [struct.calcsize(code)] * int(count or 1))
    ]
    assert flat == sizes


def test_the_numbers_of() -> None:
    assert lib.DISK_FORMAT_VERSION == disk_format.FORMAT_VERSION == 1
    assert lib.DISK_UNIT_BYTES == disk_format.UNIT_BYTES == 4096
    assert f"at most {lib.DISK_DROPS_MAX}" in PAGE
    assert f"in its lower {lib.DISK_SEQUENCE_BITS}" in PAGE
    for counter in re.findall(r"^\|.*\| `(\w+)`", PAGE.split("## When something is wrong")[1], re.M):
        assert f"{counter}_total" in {name for name, _ in ffi.typeof("disk_stats").fields}
