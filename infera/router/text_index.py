"""Guesses what places hold from the text of what was sent to them.

For workers that publish no events and prompts whose tokens are not known here. Text is cut into chunks, each chunk
is named by the digest of all text up to its end, and a place is remembered with the chunks it was sent. A prefix that
was sent to a place counts as held there until it was not used for a while. It is a guess and shown as one.

Bounded: CHUNKS_MAX chunks, PLACES_MAX places for each (the least recently used go first), text beyond
CHUNKS_PER_TEXT_MAX chunks is not looked at. Guarantee: what is over a limit is forgotten, never kept wrongly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgspec

from infera.router.place import Key

CHUNK_BYTES: Final = 256
CHUNKS_PER_TEXT_MAX: Final = 1_024
CHUNKS_MAX: Final = 131_072
PLACES_MAX: Final = 64
ENTRY_LIFE_S: Final = 600.0
# A usual ratio for text in Latin script. Both the prompt and what is held are counted by it, so shares come out right.
BYTES_PER_TOKEN: Final = 4
_ENCODER: Final = msgspec.json.Encoder()
_PROMPT_FIELDS: Final = ("tools", "system", "messages", "input", "prompt")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt known by its text only: names of its whole chunks, and its length in estimated tokens."""

    chunks: tuple[bytes, ...]
    token_count: int


def text_prompt(model: str, body: Mapping[str, Any]) -> TextPrompt:
    """Cut up what a request says. What changes the meaning of all text (model, salt) is part of every name."""
    identity = _ENCODER.encode([model, body.get("cache_salt")])
    text = b"\n".join(_encode(body[name]) for name in _PROMPT_FIELDS if body.get(name) is not None)
    digest = blake2b(identity, digest_size=16)
    chunks = []
    for start in range(0, min(len(text), CHUNK_BYTES * CHUNKS_PER_TEXT_MAX) - CHUNK_BYTES + 1, CHUNK_BYTES):
        digest.update(text[start : start + CHUNK_BYTES])
        chunks.append(digest.digest())
    return TextPrompt(tuple(chunks), len(text) // BYTES_PER_TOKEN)


class TextIndex:
    """Chunk -> places it was sent to, and when last."""

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks: OrderedDict[bytes, dict[Key, float]] = OrderedDict()
        self._chunks_max = chunks_max

    def __len__(self) -> int:
        return len(self._chunks)

    def match(self, prompt: TextPrompt, places: Iterable[Key], now_s: float) -> dict[Key, int]:
        """Estimated tokens of the longest prefix sent to each place; places with nothing are left out."""
        left = set(places)
        found: dict[Key, int] = {}
        for count, chunk in enumerate(prompt.chunks, 1):
            senders = self._chunks.get(chunk)
            if senders is None:
                break
            left = {key for key in left if senders.get(key, -ENTRY_LIFE_S) > now_s - ENTRY_LIFE_S}
            if not left:
                break
            found.update(dict.fromkeys(left, count * CHUNK_BYTES // BYTES_PER_TOKEN))
        return found

    def sent(self, prompt: TextPrompt, place: Key, now_s: float) -> None:
        """The prompt was sent to a place."""
        # The deepest first, so that what is forgotten first is the end of a prefix and not its beginning.
        for chunk in reversed(prompt.chunks):
            senders = self._chunks.get(chunk)
            if senders is None:
                senders = self._chunks[chunk] = {}
            senders.pop(place, None)
            senders[place] = now_s
            if len(senders) > PLACES_MAX:
                del senders[next(iter(senders))]
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self._chunks_max:
            self._chunks.popitem(last=False)


def _encode(value: Any) -> bytes:
    """A value's text; the closing mark of a list is left out, because the next round's list goes on there."""
    if isinstance(value, str):
        return value.encode()
    encoded = _ENCODER.encode(value)
    return encoded[:-1] if isinstance(value, list) else encoded
