"""docs/kvd-arena.md says what is so: its tables equal the structs, and what it describes reads a real index."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from infera_core import lib

from kvd import protocol
from kvd.retention import RETENTIONS
from kvd.store import Store, index_bytes, ledger_bytes
from tests.support.arena_layout import layout, table

PAGE = (Path(__file__).parents[3] / "docs" / "kvd-arena.md").read_text()
LAYOUT = layout()
STRUCTS = sorted(name for name in LAYOUT.list_types()[0] if LAYOUT.typeof(name).kind == "struct")
WORD = 2**64 - 1


@pytest.mark.parametrize("struct", STRUCTS)
def test_the_table_of(struct: str) -> None:
    found = re.search(rf"^`{struct}`, (\d+) bytes:\n\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    assert found, f"docs/kvd-arena.md has no table of {struct}"
    assert int(found[1]) == LAYOUT.sizeof(struct)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| \S.* \|$", found[2], re.M)
    assert [(int(offset), int(size), name) for offset, size, name in rows] == table(LAYOUT, struct)


def test_the_numbers_of() -> None:
    assert "layout_version` | 3;" in PAGE
    assert lib.ARENA_LAYOUT_VERSION == 3
    assert lib.ARENA_UNIT_BYTES == 4096
    assert f"| `classes_max` | {lib.ARENA_CLASSES_MAX} |" in PAGE


def mix(a: int, b: int) -> int:
    product = a * b
    return (product ^ product >> 64) & WORD


class Reader:
    """A reader written from the page alone."""

    def __init__(self, index: bytes) -> None:
        self.index = index

    def number(self, base: int, struct: str, field: str) -> int:
        found = next(
            row for row in re.findall(r"\| (\d+) \| (\d+) \| `(\w+)` \|", self.section(struct)) if row[2] == field
        )
        offset, size = base + int(found[0]), int(found[1])
        return int.from_bytes(self.index[offset : offset + size], "little")

    @staticmethod
    def section(struct: str) -> str:
        return PAGE[PAGE.index(f"`{struct}`, ") :].split("|---|---|---|---|\n")[1].split("\n\n")[0]

    def find(self, class_id: int, key: bytes) -> dict[str, int] | None:
        header = {name: self.number(0, "arena_header", name) for name in ("bucket_count", "shards_per_record", "seed")}
        seeds = header["seed"] & WORD, header["seed"] >> 64
        words = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        hashed = mix(mix(words[0] ^ seeds[0], words[1] ^ seeds[1]) ^ class_id, 0x9E3779B97F4A7C15)
        tag = hashed >> 48 | 1
        for bucket in (hashed & header["bucket_count"] - 1, hashed >> 32 & header["bucket_count"] - 1):
            start = 4096 + bucket * 576
            tags = self.number(start, "arena_bucket", "tags")
            for lane in range(8):
                record = start + 64 + lane * 64
                if (
                    tags >> 16 * lane & 0xFFFF == tag
                    and self.number(record, "arena_record", "key").to_bytes(16, "little") == key
                ):
                    return {"slot": bucket * 8 + lane, "shard_mask": self.number(record, "arena_record", "shard_mask")}
        return None

    def shard(self, slot: int, shard: int) -> tuple[int, int, int]:
        row = slot * self.number(0, "arena_header", "shards_per_record") + shard
        at = self.number(0, "arena_header", "shards_offset") + row * 16
        return tuple(self.number(at, "arena_shard", field) for field in ("sum", "extent_start", "extent_units"))  # type: ignore[return-value]


def test_a_reader_made_from_the_page_finds_every_record() -> None:
    records, shards, data_bytes = 256, 2, 1024 * 4096
    index = bytearray(index_bytes(records, shards, data_bytes))
    store = Store(
        index, instance=os.urandom(16), generation=1, records=records, shards_max=shards, data_bytes=data_bytes,
        seed=(77, 99),
    )  # fmt: skip
    client = store.attach(bytearray(ledger_bytes(records)), 1)
    class_id = store.open_class(bytes(16), 0, [5000, 100], "model")
    keys = [os.urandom(16) for _ in range(100)]
    placed: dict[tuple[bytes, int], tuple[int, int]] = {}
    for number, (key, shard) in enumerate((key, shard) for key in keys for shard in range(shards)):
        grant = store.reserve(client, class_id, shard, RETENTIONS["short"], 0, protocol.WISH.pack(key, 1, 0), 1, 2)
        reservation, offset, *_ = protocol.GRANT.unpack(grant)
        store.commit(client, protocol.COMMITMENT.pack(reservation, number))
        placed[key, shard] = (number, offset // 4096)
    reader = Reader(bytes(index))
    for key in keys:
        found = reader.find(class_id, key)
        assert found is not None
        assert found["shard_mask"] == 0b11
        for shard, units in ((0, 2), (1, 1)):
            assert reader.shard(found["slot"], shard) == (*placed[key, shard], units)
    assert reader.find(class_id, os.urandom(16)) is None
    store.close()
