"""Content keys computed with the `blake3` package from PyPI, from the definition alone; shares no code with ours.

`python -m tests.support.content_key_reference` writes `tests/vectors/content_keys.json` anew.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

VECTORS = Path(__file__).parents[1] / "vectors" / "content_keys.json"
GRAIN_TOKENS = 16


def field(tag: bytes, value: bytes) -> bytes:
    """Tag byte, length as u32 little-endian, bytes; nothing for an empty value."""
    return tag + struct.pack("<I", len(value)) + value if value else b""


def root(identity: bytes) -> bytes:
    """The start of a chain."""
    return blake3(identity, key=b"infera content-key root v1".ljust(32, b"\0")).digest(16)


def grain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key after one grain of 16 tokens."""
    return blake3(struct.pack("<16I", *tokens), key=parent + b"infera grain v1\0").digest(16)


def extra(parent: bytes, identity: bytes) -> bytes:
    """The parent of a grain whose tokens stand for more than themselves."""
    return blake3(identity, key=parent + b"infera extra v1\0").digest(16)


def chain(parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The key of every whole grain."""
    keys = []
    for start in range(0, len(tokens) - GRAIN_TOKENS + 1, GRAIN_TOKENS):
        parent = grain(parent, tokens[start : start + GRAIN_TOKENS])
        keys.append(parent)
    return keys


def image(digest: bytes, offset_tokens: int) -> bytes:
    """One image under a grain."""
    return field(b"I", digest) + struct.pack("<i", offset_tokens)


def make_vectors() -> dict[str, Any]:
    """Everything in the file. Bytes are in hex."""
    dice = random.Random(20)
    names = {"salt": b"tenant-7", "lora": bytes(range(32)), "long_salt": dice.randbytes(3000)}
    identities = [
        (b"", b""), (names["salt"], b""), (b"", names["lora"]), (names["salt"], names["lora"]),
        ("Zürich ☂".encode(), b""), (names["long_salt"], names["lora"]),
    ]  # fmt: skip
    roots = [
        {"salt": salt.hex(), "lora": lora.hex(), "root": root(field(b"S", salt) + field(b"L", lora)).hex()}
        for salt, lora in identities
    ]
    chains = []
    for length in (0, 15, 16, 17, 31, 32, 160, 1000):
        tokens = [dice.randrange(2**32) if length == 160 else dice.randrange(150_000) for _ in range(length)]
        parent = bytes.fromhex(roots[length % len(roots)]["root"])
        keys = [key.hex() for key in chain(parent, tokens)]
        chains.append({"parent": parent.hex(), "tokens": tokens, "keys": keys})
    edge = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *range(11)]
    chains.append({"parent": roots[0]["root"], "tokens": edge, "keys": [grain(root(b""), edge).hex()]})
    extras = []
    for length in (0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 5000):
        parent, identity = dice.randbytes(16), dice.randbytes(length)
        extras.append({"parent": parent.hex(), "extra": identity.hex(), "key": extra(parent, identity).hex()})
    images = []
    for digest, offset in ((bytes(32), 0), (dice.randbytes(32), 5), (dice.randbytes(32), -48), (b"x", 15)):
        encoded = image(digest, offset)
        images.append({"digest": digest.hex(), "offset_tokens": offset, "extra": encoded.hex()})
    return {
        "format": 1,
        "about": "Definition: csrc/content_key.c. Bytes are hex; tokens are unsigned 32-bit ids.",
        "roots": roots,
        "chains": chains,
        "extras": extras,
        "images": images,
    }


if __name__ == "__main__":
    VECTORS.parent.mkdir(exist_ok=True)
    VECTORS.write_text(json.dumps(make_vectors(), indent=1) + "\n")
