"""Content keys of one request's blocks, extended as tokens arrive.

Salt and adapter are in the chain's root. An image is mixed in once, before the grain that its first placeholder
token lies in, and so is part of every key from there on; a key before it knows nothing of it. The place where it
ends is not part of the key: events do not tell it, and it follows from the placeholders and the image.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from infera_core.keys import (
    GRAIN_TOKENS,
    IDENTITY_BYTES_MAX,
    KEY_BYTES,
    chain_keys,
    extra_key,
    image_extra,
    root_key,
)

NO_TOKEN_IDS: Final = "its prompt is embeddings, not token ids"
POOLING: Final = "it is a pooling request"
PROMPT_LOGPROBS: Final = "it asks for prompt logprobs, which only computing the prompt gives"
SKIPS_CACHE: Final = "it asks not to read the prefix cache"
STREAMED: Final = "its input is streamed and takes tokens back"
ODD_SALT: Final = f"its cache salt is not text of at most {IDENTITY_BYTES_MAX} bytes"
ODD_IMAGE: Final = "one of its images has no usable identifier or place"


def is_cacheable(request: Any) -> str | None:
    """Why the blocks of a vLLM `Request` can be neither loaded nor saved under content keys; None when they can.

    The reasons are few and constant, so that they can be counted. The adapter is not looked at: a request with one
    needs its digest (`AdapterDigests`).
    """
    sampling = getattr(request, "sampling_params", None)
    if request.pooling_params is not None:
        return POOLING
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return NO_TOKEN_IDS
    if getattr(request, "resumable", False):
        return STREAMED
    if sampling is not None and sampling.prompt_logprobs is not None:
        return PROMPT_LOGPROBS
    if getattr(request, "skip_reading_prefix_cache", False):
        return SKIPS_CACHE
    if request.cache_salt and not _is_identity(request.cache_salt):
        return ODD_SALT
    if not all(_is_sound_image(feature) for feature in request.mm_features):
        return ODD_IMAGE
    return None


class RequestKeys:
    """The chain of one request. A block of any size that is a multiple of the grain is named by its last grain.

    With `enable_tower_connector_lora` vLLM puts the adapter's name before an image's hash, because the image is then
    encoded with the adapter. The identifier enters the keys as it is: engines with and without it do not mix.
    """

    def __init__(self, request: Any, adapter_digest: bytes | None) -> None:
        """`request` is one that `is_cacheable` has no reason against; `adapter_digest` None: the base model.

        Raises:
            ValueError: when the request has an adapter and no digest is given, or the other way round.
        """
        if (request.lora_request is None) != (adapter_digest is None):
            raise ValueError("a request with an adapter needs the adapter's digest, and only such a request")
        self._last = root_key(salt=(request.cache_salt or "").encode(), lora=adapter_digest or b"")
        self._images = _images_by_grain(request.mm_features)
        self._keys = bytearray()

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in the request's tokens, all of them each time; returns the number of whole grains.

        Tokens already taken in must not have changed.

        Raises:
            OverflowError: when a token is negative or does not fit 32 bits.
        """
        start, stop = len(self._keys) // KEY_BYTES, len(tokens) // GRAIN_TOKENS
        if stop > start:
            fresh = array("I", tokens[start * GRAIN_TOKENS : stop * GRAIN_TOKENS])
            self._chain(fresh, start, stop)
        return max(start, stop)

    def block_keys(self, block_size_tokens: int, start: int, stop: int) -> bytes:
        """Keys of blocks `start` to `stop` (excluded), 16 bytes each.

        Raises:
            IndexError: when the tokens taken in do not fill block `stop - 1`.
        """
        step = self._grains(block_size_tokens) * KEY_BYTES
        if stop * step > len(self._keys):
            raise IndexError(f"block {stop - 1} of {block_size_tokens} tokens is not filled yet")
        if step == KEY_BYTES:
            return bytes(self._keys[start * step : stop * step])
        ends = range((start + 1) * step, stop * step + 1, step)
        return b"".join(self._keys[end - KEY_BYTES : end] for end in ends)

    def block_count(self, block_size_tokens: int) -> int:
        """Whole blocks of that size so far."""
        return len(self._keys) // KEY_BYTES // self._grains(block_size_tokens)

    def depth_grains(self, block_size_tokens: int, block: int) -> int:
        """Grains from the root to the end of a block."""
        return (block + 1) * self._grains(block_size_tokens)

    @staticmethod
    def _grains(block_size_tokens: int) -> int:
        grains, rest = divmod(block_size_tokens, GRAIN_TOKENS)
        if rest or grains < 1:
            raise ValueError(f"blocks of {block_size_tokens} tokens have no keys: {GRAIN_TOKENS} must divide them")
        return grains

    def _chain(self, fresh: array[int], start: int, stop: int) -> None:
        """Append the keys of grains `start` to `stop`, whose tokens are `fresh`."""
        view = memoryview(fresh)
        edges = sorted({start, stop, *(grain for grain in self._images if start < grain < stop)})
        for first, end in pairwise(edges):
            if first in self._images:
                self._last = extra_key(self._last, self._images[first])
            keys = chain_keys(self._last, view[(first - start) * GRAIN_TOKENS : (end - start) * GRAIN_TOKENS])
            self._keys += keys
            self._last = keys[-KEY_BYTES:]


def _images_by_grain(features: Sequence[Any]) -> dict[int, bytes]:
    """What to mix in before a grain: the images that begin in it, in order of position."""
    extras: dict[int, bytes] = {}
    for feature in sorted(features, key=lambda feature: feature.mm_position.offset):
        grain, offset = divmod(feature.mm_position.offset, GRAIN_TOKENS)
        extras[grain] = extras.get(grain, b"") + image_extra(feature.identifier.encode(), offset)
    return extras


def _is_sound_image(feature: Any) -> bool:
    place = feature.mm_position
    return bool(feature.identifier) and _is_identity(feature.identifier) and place.offset >= 0 and place.length > 0


def _is_identity(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return len(text.encode()) <= IDENTITY_BYTES_MAX
    except UnicodeEncodeError:
        return False
