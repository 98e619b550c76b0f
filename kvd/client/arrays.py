"""Single objects from and to any memory: numpy arrays, other buffers, raw pointers.

Engines move whole batches with a copier (`kvd/client/copier.py`); this is for tools, tests and small
programs, one object a call. An object is stored under one shard.
"""

from __future__ import annotations

import importlib
from typing import Any

from infera_core import ffi

from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier, Segment


def put_pointer(
    client: KvdClient, spec: RecordSpec, key: bytes, address: int, *, shard: int = 0, depth_grains: int = 1
) -> bool:
    """Save the shard's bytes at `address`; whether they were accepted. The memory must stay while this runs."""
    size_bytes = spec.shard_bytes[shard]
    copier = CpuCopier([Segment(address, size_bytes, size_bytes)])
    return client.put(spec, shard, key, [depth_grains], copier, [0]) == 1


def get_pointer(client: KvdClient, spec: RecordSpec, key: bytes, address: int, *, shard: int = 0) -> bool:
    """Load the shard's bytes to `address`; whether they arrived and were right.

    Bytes that are wrong are written all the same, and reported to the daemon, which drops them.
    """
    run = client.pin_run(spec, key)
    if run is None:
        return False
    try:
        place = run.arena.locate(run.slots[0], shard)
        size_bytes = spec.shard_bytes[shard]
        if place is None or place.size_bytes < size_bytes:
            return False
        copier = CpuCopier([Segment(address, size_bytes, size_bytes)])
        is_right = copier.load([0], [run.arena.data_address + place.offset_bytes]) == [place.checksum]
    finally:
        run.release()
    if not is_right:
        client.report_damaged(spec, key)
    return is_right


def put_buffer(client: KvdClient, spec: RecordSpec, key: bytes, buffer: Any, *, shard: int = 0) -> bool:
    """Save a buffer (bytes, bytearray, memoryview, array) of exactly the shard's size.

    Raises:
        ValueError: when its size is another, or its bytes do not lie together.
    """
    with memoryview(buffer) as view:
        _check(view, spec.shard_bytes[shard])
        return put_pointer(client, spec, key, _address(ffi.from_buffer(view)), shard=shard)


def get_buffer(client: KvdClient, spec: RecordSpec, key: bytes, buffer: Any, *, shard: int = 0) -> bool:
    """Load into a writable buffer of exactly the shard's size; whether the bytes arrived and were right.

    Raises:
        ValueError: when its size is another, or its bytes do not lie together.
        BufferError: when it cannot be written to.
    """
    with memoryview(buffer) as view:
        _check(view, spec.shard_bytes[shard])
        return get_pointer(client, spec, key, _address(ffi.from_buffer(view, require_writable=True)), shard=shard)


def put_array(client: KvdClient, spec: RecordSpec, key: bytes, array: Any, *, shard: int = 0) -> bool:
    """Save a numpy array of any type and shape with exactly the shard's bytes, in C order.

    Raises:
        ValueError: when its size is another or it is not C-contiguous.
    """
    return put_buffer(client, spec, key, _array_bytes(array), shard=shard)


def get_array(
    client: KvdClient, spec: RecordSpec, key: bytes, dtype: Any, shape: tuple[int, ...], *, shard: int = 0
) -> Any | None:
    """Load a numpy array; None when it is not there or its bytes were wrong.

    Raises:
        ImportError: when numpy is not installed.
        ValueError: when type and shape do not make the shard's size.
    """
    array = importlib.import_module("numpy").empty(shape, dtype)  # not among our dependencies
    return array if get_buffer(client, spec, key, _array_bytes(array), shard=shard) else None


def _array_bytes(array: Any) -> memoryview:
    """An array's bytes. Types that buffers do not know, such as bfloat16, are why this goes through integers."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous; pass numpy.ascontiguousarray(array)")
    return memoryview(array.reshape(-1).view("uint8"))


def _check(view: memoryview, size_bytes: int) -> None:
    if not view.contiguous:
        raise ValueError("the buffer's bytes do not lie together")
    if view.nbytes != size_bytes:
        raise ValueError(f"the buffer has {view.nbytes} bytes; a shard of this kind has {size_bytes}")


def _address(data: Any) -> int:
    return int(ffi.cast("uintptr_t", data))
