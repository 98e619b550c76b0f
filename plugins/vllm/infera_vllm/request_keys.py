"""Content keys of one request's blocks, extended as tokens arrive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from infera_core.keys import GRAIN_TOKENS, KEY_BYTES, chain_keys, root_key


class RequestKeys:
    """The chain of one request. A block is named by the chain value at its last token.

    `block_size_tokens` is a multiple of the grain.
    """

    def __init__(self, block_size_tokens: int, salt: str | None) -> None:
        self._grains_per_block = block_size_tokens // GRAIN_TOKENS
        self._block_size_tokens = block_size_tokens
        self._last = root_key(salt=(salt or "").encode())
        self._tokens_done = 0
        self._keys = bytearray()

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in the request's tokens, all of them each time; returns the number of whole blocks.

        Tokens already taken in must not have changed.
        """
        end = len(tokens) // self._block_size_tokens * self._block_size_tokens
        if end > self._tokens_done:
            grains = chain_keys(self._last, array("I", tokens[self._tokens_done : end]))
            step = self._grains_per_block * KEY_BYTES
            for stop in range(step, len(grains) + 1, step):
                self._keys += grains[stop - KEY_BYTES : stop]
            self._last = grains[-KEY_BYTES:]
            self._tokens_done = end
        return len(self._keys) // KEY_BYTES

    def blocks(self, start: int, stop: int) -> bytes:
        """Keys of blocks `start` to `stop` (excluded), 16 bytes each."""
        return bytes(self._keys[start * KEY_BYTES : stop * KEY_BYTES])

    def depth_grains(self, block: int) -> int:
        """Grains from the root to the end of a block."""
        return (block + 1) * self._grains_per_block
