"""Content keys: 128 bits naming a prompt prefix that ends at a 16-token boundary.

The definition is in `csrc/content_key.c`; test vectors for other languages are in
`tests/vectors/content_keys.json`. Router, engine plugins, kvd and the simulator all call this.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from infera_core._native import ffi, lib

GRAIN_TOKENS = 16
KEY_BYTES = 16
IDENTITY_BYTES_MAX = 64 * 1024
"""Largest salt, adapter digest or image identity accepted."""


_INTEGER_FORMATS = frozenset("iIlL")


def _field(tag: bytes, value: bytes) -> bytes:
    if len(value) > IDENTITY_BYTES_MAX:
        raise ValueError(f"identity of {len(value)} bytes; at most {IDENTITY_BYTES_MAX} are accepted")
    return tag + struct.pack("<I", len(value)) + value if value else b""


def root_key(*, salt: bytes = b"", lora: bytes = b"") -> bytes:
    """Return the 16-byte start of a chain.

    `salt` is the tenant's cache salt (UTF-8 bytes), `lora` the content digest of the adapter.
    Each enters as tag byte, length as u32 little-endian, bytes; an empty one is left out.

    Raises:
        ValueError: when a value is longer than `IDENTITY_BYTES_MAX`.
    """
    identity = _field(b"S", salt) + _field(b"L", lora)
    out = ffi.new("uint8_t[16]")
    lib.infera_key_root(identity, len(identity), out)
    return bytes(ffi.buffer(out))


def image_extra(image_digest: bytes, offset_tokens: int) -> bytes:
    """Encode one image of a grain: its digest and where it starts, relative to the grain.

    `offset_tokens` is the image's first token position minus the grain's. An image enters a chain
    once, at the grain that it begins in. Concatenate several in order of position.

    Raises:
        ValueError: when the digest is empty or longer than `IDENTITY_BYTES_MAX`.
    """
    if not image_digest:
        raise ValueError("an image needs a digest; without one, all images would be the same")
    return _field(b"I", image_digest) + struct.pack("<i", offset_tokens)


def extra_key(parent: bytes, extra: bytes) -> bytes:
    """Return the parent to use for a grain whose tokens stand for more than themselves."""
    _check_key(parent)
    out = ffi.new("uint8_t[16]")
    lib.infera_key_extra(parent, extra, len(extra), out)
    return bytes(ffi.buffer(out))


def chain_keys(parent: bytes, tokens: Sequence[int] | array[int] | memoryview) -> bytes:
    """Return the keys of the whole grains of `tokens`, 16 bytes each, concatenated.

    `tokens` are token ids as a sequence of int, or, without a copy, an `array("I")` or another
    contiguous buffer of 32-bit items. A tail shorter than `GRAIN_TOKENS` has no key.

    Raises:
        ValueError: when the parent is not 16 bytes or a buffer's items are not 32-bit integers.
        TypeError: when the tokens are text or bytes, which hold characters, not token ids.
        OverflowError: when a token id is negative or does not fit 32 bits.
    """
    _check_key(parent)
    if isinstance(tokens, str | bytes | bytearray):
        raise TypeError(f"token ids are needed, not {type(tokens).__name__}")
    if not isinstance(tokens, array | memoryview):
        tokens = array("I", tokens)
    kind = tokens.format if isinstance(tokens, memoryview) else tokens.typecode
    if isinstance(tokens, memoryview) and tokens.ndim != 1:
        raise ValueError(f"token buffer has {tokens.ndim} dimensions; one is needed")
    if tokens.itemsize != 4 or kind.lstrip("@=<") not in _INTEGER_FORMATS:
        raise ValueError(f"token buffer has items of type {kind!r}; 32-bit integers are needed")
    grains = len(tokens) // GRAIN_TOKENS
    if grains == 0:
        return b""
    out = bytearray(grains * KEY_BYTES)
    lib.infera_key_chain(parent, ffi.from_buffer("uint32_t[]", tokens), len(tokens), ffi.from_buffer(out))
    return bytes(out)


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a content key has {KEY_BYTES} bytes, not {len(key)}")
