"""The disk tier's files read without the C store, from what docs/kvd-store.md says of them.

A second reader of the format: `infera-kvd check` uses it, so a fault of the daemon's own reader does not hide itself.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from infera_core import ffi, lib

UNIT_BYTES = 4096
FORMAT_VERSION = 1
KIND_OBJECT, KIND_VOID = 1, 2
SHARDS_MAX = 64
LENGTH_BYTES_MAX = 2**32 - 1

FORMAT = struct.Struct("<8sII16sQQII")
MARKS = struct.Struct("<8sII16sQII")
DROP_ROW = struct.Struct("<16sIIQ")
SEGMENT = struct.Struct("<8sII16sQQQQQII")
RECORD = struct.Struct("<8sII16sQQII16s16sIHHQQIIIIQQ128sII")
TRAILER = struct.Struct("<8sII16sQQIIII")
CLASS_ROW = struct.Struct("<16sII128s")
RECORD_ROW = struct.Struct("<16sQQIIHBBI")


_SEGMENT_FILE = re.compile(r"[0-9]{8}\.segment")


class FormatError(Exception):
    """A block is not what it should be; the text says which."""


def crc32c(data: bytes | memoryview) -> int:
    """CRC32C of some bytes."""
    return int(lib.checksum_crc32c(0, ffi.from_buffer(data), len(data)))


def checksum(data: bytes | memoryview) -> int:
    """The arena's checksum of an object."""
    return int(lib.checksum_bytes(ffi.from_buffer(data), len(data)))


def _unpacked(layout: struct.Struct, magic: bytes, block: bytes | memoryview, what: str) -> tuple[object, ...]:
    """The fields of a block whose magic, version and check word are right.

    Raises:
        FormatError: when they are not.
    """
    if len(block) < layout.size:
        raise FormatError(f"{what} is cut off")
    fields = layout.unpack_from(block)
    if fields[0] != magic:
        raise FormatError(f"{what} has no magic number")
    if fields[1] != FORMAT_VERSION:
        raise FormatError(f"{what} has format version {fields[1]}; this infera-kvd knows {FORMAT_VERSION}")
    if crc32c(bytes(block[: layout.size - 4])) != fields[-1]:
        raise FormatError(f"{what} has a wrong check word")
    return fields


def sealed(layout: struct.Struct, fields: tuple[object, ...]) -> bytes:
    """A block with its check word made right."""
    body = layout.pack(*fields[:-1], 0)[:-4]
    return body + crc32c(body).to_bytes(4, "little")


@dataclass(frozen=True)
class StoreFormat:
    """`format`: what a whole folder has in common."""

    store_id: bytes
    segment_bytes: int

    @classmethod
    def read(cls, block: bytes) -> StoreFormat:
        """Check and take apart. Raises FormatError."""
        fields = FORMAT.unpack(_padded(block, FORMAT, "format"))
        _unpacked(FORMAT, b"IFKDFMT1", block, "format")
        if fields[4] < 65536 or fields[4] % UNIT_BYTES:
            raise FormatError("format has an impossible segment size")
        return cls(fields[3], fields[4])


def _padded(block: bytes, layout: struct.Struct, what: str) -> bytes:
    if len(block) < layout.size:
        raise FormatError(f"{what} is cut off")
    return block[: layout.size]


@dataclass(frozen=True)
class SegmentName:
    """What all blocks of one use of a segment carry."""

    store: StoreFormat
    number: int
    generation: int


def read_segment_header(store: StoreFormat, number: int, block: bytes | memoryview) -> SegmentName | None:
    """The header of a segment file; None when it was never used. Raises FormatError."""
    if not any(block):
        return None
    fields = _unpacked(SEGMENT, b"IFKDSEG1", block, "segment header")
    _, _, said_number, store_id, generation, segment_bytes = fields[:6]
    if store_id != store.store_id or segment_bytes != store.segment_bytes:
        raise FormatError("segment header belongs to another store")
    if said_number != number:
        raise FormatError(f"segment header says it is segment {said_number}: the file was renamed or swapped")
    if not isinstance(generation, int) or not generation:
        raise FormatError("segment header has no generation")
    return SegmentName(store, number, generation)


@dataclass(frozen=True)
class RecordHead:
    """A record's head. `start_unit` is where it is in its segment."""

    fields: tuple[object, ...]
    kind: int
    sequence: int
    start_unit: int
    namespace: bytes
    key: bytes
    group: int
    shard: int
    shard_count: int
    length_bytes: int
    sum: int
    retention: int
    expires_s: int
    model: str

    @property
    def units(self) -> int:
        """Units of the whole record."""
        return 1 + -(-self.length_bytes // UNIT_BYTES)

    @property
    def offset_bytes(self) -> int:
        """Where the object's bytes begin in the segment."""
        return (self.start_unit + 1) * UNIT_BYTES

    def as_void(self) -> bytes:
        """The same head, saying that the record is nothing any more."""
        return sealed(RECORD, (*self.fields[:2], KIND_VOID, *self.fields[3:]))


def read_record(name: SegmentName, start_unit: int, block: bytes | memoryview) -> RecordHead:
    """Check and take apart the head of a record. Raises FormatError."""
    fields = _unpacked(RECORD, b"IFKDREC1", block, "record head")
    (
        _, _, kind, store_id, generation, sequence, segment, said_unit, namespace, key, group, shard, shard_count,
        length_bytes, total, sum_kind, retention, expires_s, _, _, _, model, _, _,
    ) = RECORD.unpack_from(block)  # fmt: skip
    head = RecordHead(
        fields, kind, sequence, said_unit, namespace, key, group, shard, shard_count, length_bytes, total, retention,
        expires_s, model.split(b"\0")[0].decode(errors="replace"),
    )  # fmt: skip
    if store_id != name.store.store_id or segment != name.number or generation != name.generation:
        raise FormatError("record head belongs to another segment, or an earlier use of this one")
    if said_unit != start_unit:
        raise FormatError(f"record head belongs at unit {said_unit}")
    room = name.store.segment_bytes // UNIT_BYTES - 1 - start_unit
    if not 0 < length_bytes <= LENGTH_BYTES_MAX or head.units > room:
        raise FormatError("record does not fit its segment")
    if not 1 <= shard_count <= SHARDS_MAX or shard >= shard_count or sum_kind != 1:
        raise FormatError("record head is of an unknown kind")
    return head


@dataclass(frozen=True)
class Table:
    """A segment's table: raw class rows, and record rows as (start unit, sequence, raw row)."""

    fields: tuple[object, ...]
    classes: tuple[bytes, ...]
    rows: tuple[tuple[int, int, bytes], ...]
    offset_bytes: int

    def without(self, start_units: set[int]) -> tuple[bytes, bytes]:
        """Table and trailer with some records left out, both to be written where the old ones are."""
        kept = [row for unit, _, row in self.rows if unit not in start_units]
        table = b"".join(self.classes) + b"".join(kept)
        fields = (*self.fields[:7], len(kept), crc32c(table), 0)
        return table, sealed(TRAILER, fields)


def read_trailer(name: SegmentName, block: bytes | memoryview) -> tuple[tuple[object, ...], int, int] | None:
    """A trailer's fields, and where its table is, in bytes; None when there is none of this use of the segment.

    Raises:
        FormatError: when there is something else, perhaps what was once a trailer.
    """
    if not any(block):
        return None
    fields = _unpacked(TRAILER, b"IFKDSUM1", block, "trailer")
    _, _, number, store_id, generation, offset, classes, records, _, _ = TRAILER.unpack_from(block)
    if (number, store_id, generation) != (name.number, name.store.store_id, name.generation):
        return None
    size = classes * CLASS_ROW.size + records * RECORD_ROW.size
    if offset % UNIT_BYTES or offset + size > name.store.segment_bytes - UNIT_BYTES:
        return None
    return fields, offset, size


def read_table(fields: tuple[object, ...], offset: int, table: bytes) -> Table:
    """Check and take apart a table. Raises FormatError."""
    classes, records, check = TRAILER.unpack(TRAILER.pack(*fields))[6:9]
    if crc32c(table) != check:
        raise FormatError("table has a wrong check word")
    split = classes * CLASS_ROW.size
    class_rows = tuple(table[at : at + CLASS_ROW.size] for at in range(0, split, CLASS_ROW.size))
    rows = []
    for index in range(records):
        at = split + index * RECORD_ROW.size
        raw = table[at : at + RECORD_ROW.size]
        _, sequence, _, start_unit, _, _, _, _, _ = RECORD_ROW.unpack(raw)
        rows.append((start_unit, sequence, raw))
    return Table(fields, class_rows, tuple(rows), offset)


def row_matches(table: Table, row: bytes, head: RecordHead) -> bool:
    """Whether a table's row says what the record's head says."""
    key, sequence, length_bytes, start_unit, _, class_row, shard, _, _ = RECORD_ROW.unpack(row)
    if class_row >= len(table.classes):
        return False
    namespace, group, shard_count, _ = CLASS_ROW.unpack(table.classes[class_row])
    return (key, sequence, length_bytes, start_unit, shard, namespace, group, shard_count) == (
        head.key, head.sequence, head.length_bytes, head.start_unit, head.shard, head.namespace, head.group,
        head.shard_count,
    )  # fmt: skip


def drop_rows(store: StoreFormat, marks: bytes) -> list[tuple[bytes, int, int]]:
    """(namespace, group, sequence number before which its records are gone). Raises FormatError."""
    _unpacked(MARKS, b"IFKDMRK1", marks, "marks")
    _, _, count, store_id, _, rows_check, _ = MARKS.unpack_from(marks)
    rows = marks[MARKS.size :]
    if store_id != store.store_id or len(rows) != count * DROP_ROW.size or crc32c(rows) != rows_check:
        raise FormatError("marks are damaged")
    return [(namespace, group, before) for namespace, group, _, before in DROP_ROW.iter_unpack(rows)]


def segment_names(names: Iterable[str]) -> list[int]:
    """Numbers of the segment files among a folder's names."""
    return sorted(int(name[:8]) for name in names if _SEGMENT_FILE.fullmatch(name))
