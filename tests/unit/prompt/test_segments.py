"""Piece by piece gives the ids of the whole text, and a tokenizer for which that is not sure is left whole."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from infera.prompt.segments import CACHE_ENTRIES_MAX, SegmentedTokenizer
from tests.support.models import SPECIALS, make_model_folder

_SPICES = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<", "|>", " ", "  ", "\n", "\n\n", "\t", "\r\n",
    "user\n", "e\u0301", "\u00a0", "\u200d", "ﬁ", "🇪🇸", "日本", "'s", "123", "<file_sep>", "<jupyter_code>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(_SPICES) | st.text(max_size=8), max_size=30).map("".join)


# One of each kind of tokenizer that is taken piece by piece: what stands before the model, and the space it adds.
STYLES: dict[str, dict[str, Any]] = {
    "byte-level": {},
    "byte-level with a prefix space": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    },
    "composed letters": {"normalizer": {"type": "NFC"}},
    "digits and lines apart": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\n+"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    },
    "a mark before every piece": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
    },
    "a mark before every word": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    },
}


def _with_mark(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer, knowing the mark of a word's beginning as a token."""
    vocabulary = content["model"]["vocab"]
    vocabulary["▁"] = max(vocabulary.values()) + 1
    return content


@cache
def styled(style: str) -> tuple[Tokenizer, SegmentedTokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        content = json.loads((make_model_folder(Path(folder) / "m", None) / "tokenizer.json").read_text())
    text = json.dumps(_with_mark(content) | STYLES[style])
    return Tokenizer.from_str(text), SegmentedTokenizer(Tokenizer.from_str(text), cache_bytes_max=20_000)


@pytest.mark.parametrize("style", sorted(STYLES))
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
@example(text="<|im_start|><|im_start|>")
@example(text=" <|im_end|> ")
@example(text="")
def test_pieces_give_the_ids_of_the_whole_text(style: str, text: str) -> None:
    whole, segmented = styled(style)
    assert segmented.is_segmented
    assert segmented.encode(text).tolist() == whole.encode(text, add_special_tokens=False).ids


def test_a_mark_before_the_first_word_only_is_why_that_kind_is_left_whole(tmp_path: Path) -> None:
    """Cut anyway, every piece would get the mark: the refusal of this kind is not mere caution."""
    kind = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    segmented = tokenizer_with({"pre_tokenizer": kind}, tmp_path)
    assert not segmented.is_segmented
    text = "aa<|im_end|>aa"
    right = segmented.encode(text).tolist()
    segmented._cut = re.compile(r"(<\|im_end\|>)")
    assert segmented.encode(text).tolist() != right


def tokenizer_with(change: dict[str, Any], tmp_path: Path) -> SegmentedTokenizer:
    folder = make_model_folder(tmp_path / "m", None)
    content = _with_mark(json.loads((folder / "tokenizer.json").read_text()))
    content.update(change)
    return SegmentedTokenizer(Tokenizer.from_str(json.dumps(content)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}}, True),
        ({"added_tokens": []}, False),
        (
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}},
            False,
        ),
        (
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}},
            True,
        ),
    ],
)
def test_conditions_are_read_off_the_file(change: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    assert tokenizer_with(change, tmp_path).is_segmented is expected


@pytest.mark.parametrize("reach", ["lstrip", "rstrip", "single_word"])
def test_special_tokens_that_reach_beyond_themselves_forbid_cutting(reach: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<far>", normalized=False, **{reach: True})])
    segmented = SegmentedTokenizer(tokenizer)
    assert not segmented.is_segmented
    text = "a <far> b<|im_end|> c<far>d"
    assert segmented.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_dropout_forbids_cutting() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], dropout=0.5))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<x>"])
    assert not SegmentedTokenizer(tokenizer).is_segmented


def test_the_longest_of_several_tokens_is_cut(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<a>", "<a><b>", "<b><c>"])
    text = "x<a><b><c>y<a>z<b><c>"
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert SegmentedTokenizer(tokenizer).encode(text).tolist() == expected


class CountingTokenizer:
    """A tokenizer that notes what it was asked."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.asked.extend(texts)
        return self._inner.encode_batch_fast(texts, **options)


def counting(tmp_path: Path) -> CountingTokenizer:
    return CountingTokenizer(Tokenizer.from_file(str(make_model_folder(tmp_path / "m", None) / "tokenizer.json")))


def test_a_repeated_prefix_is_tokenized_once(tmp_path: Path) -> None:
    tokenizer = counting(tmp_path)
    segmented = SegmentedTokenizer(tokenizer)  # type: ignore[arg-type]
    first = "<|im_start|>user\nquestion<|im_end|>"
    segmented.encode(first)
    tokenizer.asked.clear()
    segmented.encode(first + "<|im_start|>assistant\nanswer<|im_end|>")
    assert tokenizer.asked == ["assistant\nanswer"]


def test_the_cache_forgets_the_oldest_at_its_limit(tmp_path: Path) -> None:
    tokenizer = counting(tmp_path)
    segmented = SegmentedTokenizer(tokenizer, cache_bytes_max=2000)  # type: ignore[arg-type]
    for number in range(50):
        segmented.encode(f"piece {number}<|im_end|>")
    assert 0 < segmented._cache_bytes <= 2000
    assert segmented._cache_bytes < 50 * 256
    tokenizer.asked.clear()
    segmented.encode("piece 0<|im_end|>piece 49")
    assert tokenizer.asked == ["piece 0"]
    segmented.encode("x" * 2000)
    assert segmented._cache_bytes <= 2000
    assert len(segmented._cache) < CACHE_ENTRIES_MAX


def test_threads_share_one_tokenizer(tmp_path: Path) -> None:
    segmented = SegmentedTokenizer(counting(tmp_path), cache_bytes_max=3000)  # type: ignore[arg-type]
    texts = [SPECIALS[number % len(SPECIALS)].join(f"w{number + step}" for step in range(5)) for number in range(40)]
    expected = [segmented.encode(text).tolist() for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            wrong.extend(
                text for text, ids in zip(texts, expected, strict=True) if segmented.encode(text).tolist() != ids
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
