"""The device's copier with host memory in the device's place: the same bytes and checksums as the CPU's."""

from __future__ import annotations

import ctypes
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.client.copier import CpuCopier, Segment
from kvd.client.device_copier import DeviceCopier

BLOCKS, STRIDE = 8, 4096


class HostDevice:
    """Copies at once, and remembers what it was asked for."""

    def __init__(self, descriptors_max: int = 1000) -> None:
        self.descriptors_max = descriptors_max
        self.calls: list[tuple[int, bool, object]] = []
        self.registered: list[tuple[int, int]] = []
        self.marks = 0

    def mark(self) -> object:
        self.marks += 1
        return self.marks

    def register(self, address: int, size_bytes: int) -> None:
        self.registered.append((address, size_bytes))

    def copy(
        self, sources: array[int], targets: array[int], sizes: array[int], *, to_device: bool, after: object
    ) -> None:
        assert len(sources) == len(targets) == len(sizes) <= self.descriptors_max
        self.calls.append((len(sizes), to_device, after))
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(target, source, size)


class Memory:
    """Two layers' tensors and an arena of objects."""

    def __init__(self, seed: int) -> None:
        content = random.Random(seed).randbytes(2 * BLOCKS * STRIDE)
        self.tensors = ctypes.create_string_buffer(content, len(content))
        self.arena = ctypes.create_string_buffer(BLOCKS * 2 * STRIDE)
        first = ctypes.addressof(self.tensors)
        self.segments = [Segment(first, STRIDE, 3000), Segment(first + BLOCKS * STRIDE, STRIDE, STRIDE)]
        self.object_bytes = 3000 + STRIDE

    def objects(self, count: int) -> list[int]:
        return [ctypes.addressof(self.arena) + place * 2 * STRIDE for place in range(count)]


def test_it_saves_and_loads_what_the_cpus_copier_does() -> None:
    one, other = Memory(1), Memory(1)
    cpu, device = CpuCopier(one.segments), DeviceCopier(other.segments, HostDevice())
    assert cpu.object_bytes == device.object_bytes == one.object_bytes
    blocks = [5, 0, 7]
    assert cpu.save(blocks, one.objects(3)) == device.save(blocks, other.objects(3))
    assert one.arena.raw == other.arena.raw
    targets = [1, 2, 3]
    assert cpu.load(targets, one.objects(3)) == device.load(targets, other.objects(3))
    assert one.tensors.raw == other.tensors.raw


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_large_batches_are_cut_to_what_one_call_takes(limit: int) -> None:
    memory, device = Memory(2), HostDevice(limit)
    DeviceCopier(memory.segments, device).save(list(range(5)), memory.objects(5))
    assert sum(count for count, _, _ in device.calls) == 10
    assert len(device.calls) == -(-10 // limit)


def test_copies_come_after_the_work_they_depend_on() -> None:
    memory, device = Memory(3), HostDevice()
    copier = DeviceCopier(memory.segments, device)
    mark = copier.mark()
    copier.save([1], memory.objects(1), mark)
    copier.load([1], memory.objects(1), mark)
    assert device.calls == [(2, False, mark), (2, True, mark)]


def test_a_wrong_byte_in_the_arena_shows_in_the_sum() -> None:
    memory = Memory(4)
    copier = DeviceCopier(memory.segments, HostDevice())
    (saved,) = copier.save([1], memory.objects(1))
    memory.arena[100] = bytes([memory.arena.raw[100] ^ 1])
    assert copier.load([2], memory.objects(1)) != [saved]


def test_the_arena_is_named_to_the_device() -> None:
    memory, device = Memory(5), HostDevice()
    arena: Any = SimpleNamespace(data_address=4096, data_bytes=1 << 20)
    DeviceCopier(memory.segments, device).prepare(arena)
    assert device.registered == [(4096, 1 << 20)]


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        DeviceCopier([], HostDevice())
    memory = Memory(6)
    with pytest.raises(ValueError, match="2 blocks but 1 objects"):
        DeviceCopier(memory.segments, HostDevice()).save([1, 2], memory.objects(1))
