"""Gather and scatter: the bytes delivered are right, and so is their checksum."""

from __future__ import annotations

import ctypes
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core import ffi, lib

from kvd.client.copier import CpuCopier, Segment

LEAF_BYTES = 16384
STREAMING_BYTES = 256 * 1024
MASK = 2**64 - 1


def crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def reference_sum(data: bytes) -> int:
    """The definition at the top of csrc/checksum.c."""
    leaves = [data[i : i + LEAF_BYTES] for i in range(0, len(data), LEAF_BYTES)]
    return (sum(mix(i << 32 | crc32c(leaf)) for i, leaf in enumerate(leaves)) + mix(~len(data) & MASK)) & MASK


def c_sum(data: bytes) -> int:
    return int(lib.checksum_bytes(ffi.from_buffer(data), len(data)))


class Blocks:
    """Segments with gaps between their blocks, in memory of any alignment, and the objects beside them."""

    def __init__(self, sizes: list[int], count: int, skew: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.sizes, self.count = sizes, count
        self.buffers: list[ctypes.Array[ctypes.c_char]] = []
        segments = []
        for size in sizes:
            stride = size + self.dice.randrange(40)
            address = self.memory(stride * count + size, skew)
            segments.append(Segment(address, stride, size))
        self.segments = segments
        self.copier = CpuCopier(segments)
        self.objects = [self.memory(sum(sizes), self.dice.randrange(17)) for _ in range(count)]

    def memory(self, size: int, skew: int) -> int:
        content = self.dice.randbytes(size + skew + 16)
        self.buffers.append(ctypes.create_string_buffer(content, len(content)))
        return ctypes.addressof(self.buffers[-1]) + skew

    def block(self, number: int) -> bytes:
        parts = [ctypes.string_at(s.address + number * s.stride_bytes, s.size_bytes) for s in self.segments]
        return b"".join(parts)

    def object(self, number: int) -> bytes:
        return ctypes.string_at(self.objects[number], sum(self.sizes))

    def all_memory(self) -> list[bytes]:
        return [bytes(buffer) for buffer in self.buffers]


segment_sizes = st.lists(
    st.one_of(st.integers(1, 9000), st.sampled_from([1, 15, 16, 4095, 4096, 4097, 8192, 16384, 16385])),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("data", [b"", b"a", b"123456789", bytes(4096), bytes(4097)])
def test_the_checksum_of_plain_bytes(data: bytes) -> None:
    assert c_sum(data) == reference_sum(data)


def test_the_known_answer_of_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(segment_sizes, st.integers(0, 16), st.integers(0, 2**32))
def test_gather_and_scatter_equal_the_reference(sizes: list[int], skew: int, seed: int) -> None:
    blocks = Blocks(sizes, 3, skew, seed)
    order = [2, 0, 1]
    sums = blocks.copier.save(order, blocks.objects)
    for position, block in enumerate(order):
        assert blocks.object(position) == blocks.block(block)
    assert sums == [reference_sum(blocks.object(i)) for i in range(3)]
    delivered = blocks.copier.load([0, 1, 2], blocks.objects)
    assert delivered == sums
    assert [blocks.block(i) for i in range(3)] == [blocks.object(i) for i in range(3)]


@given(segment_sizes, st.integers(0, 16), st.integers(0, 2**32))
def test_scatter_writes_the_block_and_nothing_else(sizes: list[int], skew: int, seed: int) -> None:
    blocks = Blocks(sizes, 3, skew, seed)
    before = blocks.all_memory()
    blocks.copier.load([1], [blocks.objects[0]])
    after = blocks.all_memory()
    assert after[len(sizes) :] == before[len(sizes) :]
    for segment, buffer, old, new in zip(blocks.segments, blocks.buffers, before, after, strict=False):
        start = segment.address + segment.stride_bytes - ctypes.addressof(buffer)
        assert new[:start] == old[:start]
        assert new[start + segment.size_bytes :] == old[start + segment.size_bytes :]


@pytest.mark.parametrize("skew", [0, 1, 8])
@pytest.mark.parametrize("size", [STREAMING_BYTES + step for step in (-4096, -1, 0, 1, 4095, 16384)])
def test_sizes_around_the_switch_to_streaming(size: int, skew: int) -> None:
    blocks = Blocks([size - 5000, 5000], 1, skew, seed=size)
    sums = blocks.copier.save([0], blocks.objects)
    assert blocks.object(0) == blocks.block(0)
    assert sums == [reference_sum(blocks.object(0))]
    assert blocks.copier.load([0], blocks.objects) == sums
    assert blocks.object(0) == blocks.block(0)


@pytest.mark.parametrize("size", [1, 64, 300, LEAF_BYTES + 33])
def test_every_flipped_bit_changes_the_sum(size: int) -> None:
    data = bytearray(random.Random(size).randbytes(size))
    right = c_sum(bytes(data))
    for bit in range(size * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert c_sum(bytes(data)) != right
        data[bit // 8] ^= 1 << bit % 8
    assert c_sum(bytes(data)) == right


def test_swapped_leaves_and_lost_tails_change_the_sum() -> None:
    leaves = [bytes([i]) * LEAF_BYTES for i in range(4)]
    sums = {c_sum(b"".join(leaves)), c_sum(b"".join(leaves[::-1])), c_sum(b"".join(leaves[:3]))}
    sums |= {c_sum(bytes(length)) for length in range(10)}
    assert len(sums) == 13


def test_no_segment_and_uneven_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        CpuCopier([])
    copier = CpuCopier([Segment(0, 0, 1)])
    with pytest.raises(ValueError, match="2 blocks but 1 objects"):
        copier.save([0, 1], [0])
    assert copier.load([], []) == []
