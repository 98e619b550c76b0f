"""Frames: cut anywhere, refused when too long or foreign, and the same after a round trip."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core import ffi

from kvd import protocol
from kvd.protocol import Frame, FrameReader, Kind, Message, ProtocolError, decode_json, encode, encode_json

frames = st.builds(
    Frame, st.integers(0, 2**16 - 1), st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.binary(max_size=300)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def bytes_of(frame: Frame) -> bytes:
    return encode(frame.message, Kind(frame.kind), frame.request_id, frame.payload)


def read_all(reader: FrameReader) -> list[Frame]:
    found = []
    while frame := reader.next_frame():
        found.append(frame)
    return found


def test_a_frame_split_at_every_byte() -> None:
    wanted = [Frame(Message.OPEN, Kind.REQUEST, 7, b"{}"), Frame(Message.TOUCH, Kind.ERROR, 2**32 - 1, b"x" * 40)]
    stream = b"".join(bytes_of(frame) for frame in wanted)
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        reader.feed(stream[:cut])
        found = read_all(reader)
        reader.feed(stream[cut:])
        assert found + read_all(reader) == wanted
    reader, found = FrameReader(), []
    for byte in stream:
        reader.feed(bytes([byte]))
        found += read_all(reader)
    assert found == wanted


@given(st.lists(frames, max_size=8), st.data())
def test_any_frames_survive_any_cutting(wanted: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(bytes_of(frame) for frame in wanted)
    reader, found = FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:size])
        stream = stream[size:]
        found += read_all(reader)
    assert found == wanted


@given(st.binary(min_size=16, max_size=200))
def test_noise_is_refused_or_waits_but_never_passes_unseen(noise: bytes) -> None:
    reader = FrameReader()
    reader.feed(noise)
    try:
        frame = reader.next_frame()
    except ProtocolError:
        return
    assert noise[12:16] == b"IKVD"
    assert frame is None or len(frame.payload) == int.from_bytes(noise[:4], "little")


def test_a_wrong_magic_number_is_refused() -> None:
    reader = FrameReader()
    reader.feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="magic"):
        reader.next_frame()


@pytest.mark.parametrize("size", [protocol.FRAME_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_a_giant_frame_is_refused_from_its_header_alone(size: int) -> None:
    reader = FrameReader()
    reader.feed(protocol.HEADER.pack(size, Message.OPEN, Kind.REQUEST, 1, protocol.MAGIC))
    with pytest.raises(ProtocolError, match="at most"):
        reader.next_frame()


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    reader = FrameReader()
    reader.feed(encode(Message.OPEN, Kind.REQUEST, 1, bytes(protocol.FRAME_BYTES_MAX)))
    frame = reader.next_frame()
    assert frame is not None
    assert len(frame.payload) == protocol.FRAME_BYTES_MAX
    with pytest.raises(ValueError, match="at most"):
        encode(Message.OPEN, Kind.REQUEST, 1, bytes(protocol.FRAME_BYTES_MAX + 1))


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_json_round_trip(value: dict[str, object]) -> None:
    assert decode_json(encode_json(value)) == value


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000])
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        decode_json(payload)


@pytest.mark.parametrize(
    ("packed", "name"), [(protocol.WISH, "wish"), (protocol.GRANT, "grant"), (protocol.COMMITMENT, "commitment")]
)
def test_packed_structs_are_those_of_the_c_header(packed: struct.Struct, name: str) -> None:
    assert packed.size == ffi.sizeof(f"store_{name}")


def test_a_full_batch_fits_a_frame() -> None:
    largest = max(protocol.WISH.size, protocol.GRANT.size, protocol.COMMITMENT.size, 16)
    assert protocol.BATCH_MAX * largest + protocol.RESERVE_HEAD.size <= protocol.FRAME_BYTES_MAX
