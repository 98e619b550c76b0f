"""Tokenizing piece by piece: text between special tokens by itself, and a repeated piece only once.

A prompt that grows turn by turn is the same text but for its end. Special tokens cut it into pieces, and where
a tokenizer treats every piece alone, the ids of the whole are those of the pieces, one after the other.
That holds under these conditions, which are read off the tokenizer's file; a tokenizer that misses one is used on
the whole text:

* Added tokens that are found in the raw text (not normalized) are found first, from the left, the longest one where
  several begin, and none may reach beyond itself (strip the space around it, or insist on whole words). Then every
  match of the whole text is a cut here, and no piece holds a match of its own.
* Normalizer and pre-tokenizer get each piece on its own, so only one that looks at a piece's place in the text
  could tell the difference: a Metaspace that marks the first word only. Kinds not known here count as one.
* The model works inside one word, without chance (dropout), and adds nothing at the ends of a text.
* What the post-processor adds is a constant beginning and end.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from typing import Any, Final

from tokenizers import Tokenizer

CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
CACHE_ENTRIES_MAX: Final = 65_536
_ENTRY_BYTES: Final = 256
_ALONE_NORMALIZERS: Final = frozenset(
    {
        "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "Replace", "Prepend",
        "BertNormalizer", "ByteLevel", "Precompiled",
    }
)  # fmt: skip
_ALONE_PRE_TOKENIZERS: Final = frozenset(
    {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Punctuation", "Split", "UnicodeScripts",
        "Whitespace", "WhitespaceSplit", "FixedLength",
    }
)  # fmt: skip
_ALONE_MODELS: Final = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})


class SegmentedTokenizer:
    """A tokenizer with a cache of pieces. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._tokenizer = tokenizer
        self._cut = _cut_expression(json.loads(tokenizer.to_str()))
        self._special = {
            token.content: array("I", [number])
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if not token.normalized
        }
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._cache_bytes = 0
        self._cache_bytes_max = cache_bytes_max
        self._lock = threading.Lock()

    @property
    def is_segmented(self) -> bool:
        """Whether pieces can be taken by themselves."""
        return self._cut is not None

    def encode(self, text: str) -> array[int]:
        """Ids of ``text`` without what a post-processor adds. Fresh text releases the GIL."""
        pieces = self._cut.split(text) if self._cut is not None else [text]
        # Pieces and special tokens take turns, because the expression has one group.
        found: list[array[int] | None] = [
            self._special[piece] if position % 2 else self._look_up(piece) for position, piece in enumerate(pieces)
        ]
        fresh = list(dict.fromkeys(pieces[position] for position, ids in enumerate(found) if ids is None))
        made = dict(zip(fresh, self._encode_fresh(fresh), strict=True))
        whole: array[int] = array("I")
        for piece, ids in zip(pieces, found, strict=True):
            whole += made[piece] if ids is None else ids
        return whole

    def _encode_fresh(self, texts: list[str]) -> list[array[int]]:
        if not texts:
            return []
        # The batch call, because the plain one holds the GIL until it is done.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        made = [array("I", encoding.ids) for encoding in encodings]
        for text, ids in zip(texts, made, strict=True):
            self._remember(text, ids)
        return made

    def _look_up(self, piece: str) -> array[int] | None:
        if not piece:
            return _NOTHING
        with self._lock:
            ids = self._cache.get(piece)
            if ids is not None:
                self._cache.move_to_end(piece)
            return ids

    def _remember(self, piece: str, ids: array[int]) -> None:
        size = _size_bytes(piece, ids)
        if size > self._cache_bytes_max:
            return
        with self._lock:
            if piece not in self._cache:
                self._cache_bytes += size
            self._cache[piece] = ids
            while self._cache_bytes > self._cache_bytes_max or len(self._cache) > CACHE_ENTRIES_MAX:
                oldest, gone = self._cache.popitem(last=False)
                self._cache_bytes -= _size_bytes(oldest, gone)


_NOTHING: Final[array[int]] = array("I")


def _size_bytes(piece: str, ids: array[int]) -> int:
    """What an entry costs, as if every character took four bytes."""
    return _ENTRY_BYTES + 4 * len(piece) + 4 * len(ids)


def _cut_expression(content: dict[str, Any]) -> re.Pattern[str] | None:
    """What to cut at: the special tokens; None where a condition is missing or there is nothing to cut at."""
    raw = [token for token in content.get("added_tokens") or () if not token["normalized"]]
    if not raw or any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in raw):
        return None
    if any(not token["content"] for token in raw) or not _works_piece_by_piece(content):
        return None
    longest_first = sorted((token["content"] for token in raw), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _works_piece_by_piece(content: dict[str, Any]) -> bool:
    model = content["model"]
    if model.get("type", "BPE") not in _ALONE_MODELS or model.get("dropout"):
        return False
    if any(part["type"] not in _ALONE_NORMALIZERS for part in _parts(content.get("normalizer"), "normalizers")):
        return False
    return all(
        part["type"] in _ALONE_PRE_TOKENIZERS
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") in ("always", "never"))
        for part in _parts(content.get("pre_tokenizer"), "pretokenizers")
    )


def _parts(component: dict[str, Any] | None, field: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for inner in component[field] for part in _parts(inner, field)]
    return [component]
