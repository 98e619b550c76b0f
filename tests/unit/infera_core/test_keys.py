"""Content keys: our C against the vector file and against the `blake3` package."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core import keys

from tests.support import content_key_reference as reference

VECTORS: dict[str, Any] = json.loads(reference.VECTORS.read_text())

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)
parents = st.binary(min_size=16, max_size=16)
# Lengths around the borders of BLAKE3's blocks (64), chunks (1024) and subtrees (2048, 4096).
lengths = st.one_of(
    st.integers(0, 6000),
    st.builds(lambda border, step: border + step, st.sampled_from([64, 1024, 2048, 3072, 4096]), st.integers(-2, 2)),
)
identities = st.builds(
    lambda length, seed: (seed * (length // len(seed) + 1))[:length], lengths, st.binary(min_size=1, max_size=70)
)


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def test_the_vector_file_is_what_the_reference_makes() -> None:
    assert reference.make_vectors() == VECTORS


@pytest.mark.parametrize("vector", VECTORS["roots"])
def test_roots_of_the_vector_file(vector: dict[str, str]) -> None:
    root = keys.root_key(salt=bytes.fromhex(vector["salt"]), lora=bytes.fromhex(vector["lora"]))
    assert root.hex() == vector["root"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: f"{len(vector['tokens'])} tokens")
def test_chains_of_the_vector_file(vector: dict[str, Any]) -> None:
    parent = bytes.fromhex(vector["parent"])
    assert [key.hex() for key in split(keys.chain_keys(parent, vector["tokens"]))] == vector["keys"]
    assert [key.hex() for key in split(keys.chain_keys(parent, array("I", vector["tokens"])))] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["extras"], ids=lambda vector: f"{len(vector['extra']) // 2} bytes")
def test_extras_of_the_vector_file(vector: dict[str, str]) -> None:
    key = keys.extra_key(bytes.fromhex(vector["parent"]), bytes.fromhex(vector["extra"]))
    assert key.hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["images"])
def test_images_of_the_vector_file(vector: dict[str, Any]) -> None:
    assert keys.image_extra(bytes.fromhex(vector["digest"]), vector["offset_tokens"]).hex() == vector["extra"]


@given(parents, token_lists)
def test_any_chain_equals_the_reference(parent: bytes, tokens: list[int]) -> None:
    expected = reference.chain(parent, tokens)
    assert split(keys.chain_keys(parent, tokens)) == expected
    assert split(keys.chain_keys(parent, memoryview(array("I", tokens)))) == expected


@given(parents, token_lists, st.data())
def test_a_chain_extended_in_chunks_equals_the_whole(parent: bytes, tokens: list[int], data: st.DataObject) -> None:
    whole = keys.chain_keys(parent, tokens)
    done, pieces, last = 0, b"", parent
    while done + 16 <= len(tokens):
        grains = data.draw(st.integers(1, (len(tokens) - done) // 16))
        piece = keys.chain_keys(last, tokens[done : done + 16 * grains])
        pieces, last, done = pieces + piece, piece[-16:], done + 16 * grains
    assert pieces == whole


@given(parents, identities)
def test_any_extra_equals_the_reference(parent: bytes, identity: bytes) -> None:
    assert keys.extra_key(parent, identity) == reference.extra(parent, identity)


@given(identities, identities)
def test_any_root_equals_the_reference(salt: bytes, lora: bytes) -> None:
    expected = reference.root(reference.field(b"S", salt) + reference.field(b"L", lora))
    assert keys.root_key(salt=salt, lora=lora) == expected


def test_salt_and_lora_do_not_stand_for_each_other() -> None:
    roots = {
        keys.root_key(), keys.root_key(salt=b"a"), keys.root_key(lora=b"a"), keys.root_key(salt=b"a", lora=b"a"),
        keys.root_key(salt=b"aL\x01\0\0\0a"), keys.root_key(salt=b"aa"), keys.root_key(salt=b"a", lora=b"b"),
    }  # fmt: skip
    assert len(roots) == 7


def test_one_token_changes_every_key_after_it() -> None:
    tokens = list(range(160))
    changed = tokens.copy()
    changed[37] += 1
    before = split(keys.chain_keys(keys.root_key(), tokens))
    after = split(keys.chain_keys(keys.root_key(), changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True] + [False] * 8


def test_lmcache_2136_keys_do_not_depend_on_the_process() -> None:
    """A cache named by a seeded hash finds nothing after a restart."""
    program = "from infera_core import keys; print(keys.chain_keys(keys.root_key(salt=b's'), range(32)).hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {keys.chain_keys(keys.root_key(salt=b"s"), range(32)).hex()}


@pytest.mark.parametrize("parent", [b"", b"x" * 15, b"x" * 17])
def test_a_wrong_parent_is_refused(parent: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        keys.chain_keys(parent, range(16))
    with pytest.raises(ValueError, match="16 bytes"):
        keys.extra_key(parent, b"")


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1] * 16, OverflowError),
        ([2**32] * 16, OverflowError),
        ([1.0] * 16, TypeError),
        (["1"] * 16, TypeError),
        (bytes(64), TypeError),
        (bytearray(64), TypeError),
        ("0123456789abcdef", TypeError),
        (array("H", range(16)), ValueError),
        (array("Q", range(16)), ValueError),
        (array("f", range(16)), ValueError),
        (memoryview(bytes(64)), ValueError),
        (memoryview(array("I", range(32)))[::2], (ValueError, BufferError)),
        (memoryview(bytes(128)).cast("I", (2, 16)), ValueError),
    ],
)
def test_wrong_tokens_are_refused(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        keys.chain_keys(keys.root_key(), tokens)


def test_an_identity_has_a_largest_size() -> None:
    keys.root_key(salt=bytes(keys.IDENTITY_BYTES_MAX))
    with pytest.raises(ValueError, match="at most"):
        keys.root_key(salt=bytes(keys.IDENTITY_BYTES_MAX + 1))


def test_an_image_without_a_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest"):
        keys.image_extra(b"", 0)
