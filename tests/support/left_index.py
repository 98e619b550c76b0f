"""An arena without processes: stores come and go over the same index, and tests look into its bytes.

The layout is written down here once more, from docs/kvd-arena.md, so that a test notices when it changes.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from infera_core import ffi, lib

from kvd.protocol import COMMITMENT, GRANT, WISH
from kvd.store import Store, index_bytes, ledger_bytes, record_capacity

INSTANCE = bytes(range(16))
HEADER_BYTES = 4096
BUCKET_BYTES = 576
RECORD_BYTES = 64
SHARD = struct.Struct("<QII")
UNIT_BYTES = 4096
CLASS_BYTES = 16 + 4 * 4 + 64 * 8 + 128
FAR_NS = 1 << 60


def key_of(number: int) -> bytes:
    """The key of record `number`."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def content_of(key: bytes, class_id: int, shard: int, size: int) -> bytes:
    """The only right bytes of a shard."""
    seed = hashlib.blake2b(key + bytes([class_id, shard]), digest_size=32).digest()
    return (seed * (size // 32 + 1))[:size]


def sum_of(content: bytes) -> int:
    """The checksum it is committed with."""
    return int(lib.checksum_bytes(content, len(content)))


def crc32c(crc: int, data: bytes) -> int:
    """CRC32C, bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Shape:
    """An opened class."""

    class_id: int
    shard_bytes: tuple[int, ...]


class LeftIndex:
    """See the module. `store` is the present one."""

    def __init__(self, *, data_bytes: int = 4 << 20, records: int = 256, shards_max: int = 4) -> None:
        self.records = record_capacity(records)
        self.shards_max = shards_max
        self.index = mmap.mmap(-1, index_bytes(records, shards_max, data_bytes))
        self.data = mmap.mmap(-1, data_bytes)
        self.ledgers: dict[int, mmap.mmap] = {}
        self.shapes: list[Shape] = []
        self.store = Store(
            self.index, instance=INSTANCE, generation=7, records=records, shards_max=shards_max,
            data_bytes=data_bytes, seed=(1, 2),
        )  # fmt: skip

    def close(self) -> None:
        """Free everything."""
        self.store.close()

    def adopt(self, live: Sequence[int] = ()) -> list[int | None]:
        """The daemon is gone and another comes; of the clients `live` are left. Returns their numbers."""
        self.store.close()
        ledgers = [self.ledgers[number] for number in live]
        self.store, numbers = Store.adopt(self.index, len(self.data), ledgers)
        return numbers

    def attach(self, token: int = 7) -> int:
        """A new client."""
        ledger = mmap.mmap(-1, ledger_bytes(self.records))
        number = self.store.attach(ledger, token)
        self.ledgers[number] = ledger
        return number

    def open(self, shard_bytes: tuple[int, ...], name: int | None = None) -> Shape:
        """A class."""
        number = len(self.shapes) if name is None else name
        shape = Shape(self.store.open_class(bytes([number]) * 16, number, shard_bytes, f"model-{number}"), shard_bytes)
        self.shapes.append(shape)
        return shape

    def reserve(self, client: int, shape: Shape, shard: int, key: bytes) -> tuple[int, int, int]:
        """Reservation, offset, status."""
        answer = self.store.reserve(
            client, shape.class_id, shard, lib.STORE_RETAIN_SHORT, 0, WISH.pack(key, 1, 0), 1, FAR_NS
        )
        ((reservation, offset, status, _),) = GRANT.iter_unpack(answer)
        return reservation, offset, status

    def write(self, shape: Shape, shard: int, key: bytes, offset: int) -> int:
        """Put the right bytes there; returns their checksum."""
        content = content_of(key, shape.class_id, shard, shape.shard_bytes[shard])
        self.data[offset : offset + len(content)] = content
        return sum_of(content)

    def commit(self, client: int, reservation: int, checksum: int) -> int:
        """Returns the status."""
        return int.from_bytes(self.store.commit(client, COMMITMENT.pack(reservation, checksum)), "little")

    def save(self, client: int, shape: Shape, key: bytes) -> bool:
        """All shards of a record; whether there was room."""
        for shard in range(len(shape.shard_bytes)):
            reservation, offset, status = self.reserve(client, shape, shard, key)
            if status != lib.STORE_OK:
                return False
            self.commit(client, reservation, self.write(shape, shard, key, offset))
        self.store.take_events()
        return True

    def present(self) -> set[tuple[int, bytes]]:
        """Classes and keys of all present records."""
        return {
            (event.class_id, event.keys[at : at + 16])
            for event in self.store.snapshot()
            for at in range(0, len(event.keys), 16)
        }

    # ---- looking into the index ----

    def slots(self) -> dict[tuple[int, bytes], int]:
        """Slots of records by class and key, read from the bytes."""
        found = {}
        for slot in range(self.records):
            at = self.record_at(slot)
            key, class_id = self.index[at + 8 : at + 24], int.from_bytes(self.index[at + 24 : at + 28], "little")
            if self.index[at + 32 : at + 40] != bytes(8):
                found[class_id, key] = slot
        return found

    def record_at(self, slot: int) -> int:
        """Offset of a record."""
        return HEADER_BYTES + slot // 8 * BUCKET_BYTES + 64 + slot % 8 * RECORD_BYTES

    def shard_at(self, slot: int, shard: int) -> int:
        """Offset of a shard's entry."""
        return HEADER_BYTES + self.records // 8 * BUCKET_BYTES + (slot * self.shards_max + shard) * SHARD.size

    def class_at(self, class_id: int) -> int:
        """Offset of a class."""
        return self.shard_at(self.records, 0) + class_id * CLASS_BYTES

    @property
    def slabs_at(self) -> int:
        """Offset of the slab table."""
        return self.class_at(int(lib.ARENA_CLASSES_MAX))

    def flip(self, at: int, mask: int = 1) -> None:
        """Change bits of one byte of the index."""
        self.index[at] ^= mask

    def set_check(self, slot: int) -> None:
        """Make a record's check word right again, as a stray write would not."""
        at = self.record_at(slot)
        mask = int.from_bytes(self.index[at + 32 : at + 40], "little")
        crc = crc32c(0, self.index[at + 8 : at + 60])
        for shard in range(64):
            if mask >> shard & 1:
                entry = self.shard_at(slot, shard)
                crc = crc32c(crc, self.index[entry : entry + 16])
        self.index[at + 60 : at + 64] = crc.to_bytes(4, "little")

    def wrong_bytes(self) -> list[tuple[int, bytes]]:
        """Present records whose bytes or checksums are not those saved, or that a reader cannot find."""
        status = ffi.new("int *")
        index = ffi.from_buffer(self.index)
        view = lib.arena_view_open(index, len(self.index), ffi.NULL, len(self.data), ffi.NULL, 0, status)
        assert view != ffi.NULL, status[0]
        shapes = {shape.class_id: shape for shape in self.shapes}
        slots = self.slots()
        wrong = []
        for class_id, key in self.present():
            shape = shapes[class_id]
            found = lib.arena_probe_run(view, class_id, (1 << len(shape.shard_bytes)) - 1, key, 1, ffi.NULL)
            for shard, size in enumerate(shape.shard_bytes):
                entry = self.shard_at(slots[class_id, key], shard)
                checksum, start, _ = SHARD.unpack(self.index[entry : entry + 16])
                content = content_of(key, class_id, shard, size)
                stored = self.data[start * UNIT_BYTES : start * UNIT_BYTES + size]
                if found != 1 or stored != content or checksum != sum_of(content):
                    wrong.append((class_id, key))
        lib.arena_view_close(view)
        ffi.release(index)
        return wrong
