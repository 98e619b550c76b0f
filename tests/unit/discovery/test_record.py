from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.discovery.record import (
    RECORD_BYTES_MAX,
    EventRank,
    EventSource,
    KvdSource,
    RecordError,
    decode_record,
    encode_record,
    tokenizer_digest,
)
from tests.support.records import record

FULL = record(
    aliases=("a", "b"),
    adapters={"sql": "00ff", "hub": ""},
    kvd=KvdSource(instance="00ff", namespace="aa", pub="ipc:///p", snapshot="ipc:///s"),
    tokenizer_digest="ab" * 32,
    max_context_tokens=4096,
    zone="z",
)


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(encode_record(FULL)) | fields).encode()


def test_a_record_survives_the_way_there_and_back() -> None:
    assert decode_record(encode_record(FULL)) == FULL
    assert decode_record(changed(a_field_of_a_later_version=[1])) == FULL


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": 2},
        {"hardware": "x\ny"},
        {"hardware": "x" * 1000},
        {"load": [{"running_requests": -1}]},
        {"load": [{"waiting_requests": -1}]},
        {"load": [{"computed_tokens": -1}]},
        {"load": [{"dp_rank": -1}]},
        {"load": [{"kv_usage": 1.5}]},
        {"load": [{}] * 2000},
        {"incarnation": "xyz"},
        {"incarnation": "A" * 32},
        {"worker_id": ""},
        {"worker_id": "a\r\nx: y"},
        {"worker_id": "ü"},
        {"model": ""},
        {"model": "m" * 1000},
        {"aliases": [""]},
        {"adapters": {"": ""}},
        {"adapters": {"a\nb": ""}},
        {"adapters": {"ü" * 300: ""}},
        {"adapters": {"a": "xyz"}},
        {"adapters": {"a": "abc"}},
        {"adapters": {"a": "ab" * 65}},
        {"adapters": {f"a{number}": "" for number in range(257)}},
        {"adapters": {f"{number:0500}": "" for number in range(40)}},
        {"adapters": ["a"]},
        {"aliases": ["x"] * 100},
        {"url": "https://h:1"},
        {"url": "http://h"},
        {"url": "http://h:99999"},
        {"url": "http://user:secret@h:1"},
        {"url": "http://h:1/a b"},
        {"role": "boss"},
        {"block_size_tokens": 0},
        {"max_context_tokens": -1},
        {"kv_capacity_tokens": "many"},
        {"tokenizer_digest": "not hex"},
        {"events": {"topic": "", "ranks": [{"dp_rank": 0, "pub": "ipc:///x"}]}},
        {"events": {"topic": "t", "ranks": []}},
        {"events": {"topic": "t", "ranks": [{"dp_rank": 0, "pub": "http://x"}]}},
        {"events": {"topic": "t", "ranks": [{"dp_rank": 0, "pub": "ipc:///x"}] * 2}},
        {"kvd": {"instance": "zz", "namespace": "00"}},
        {"kvd": {"instance": "00", "namespace": "00", "pub": "file:///etc"}},
    ],
)
def test_nonsense_is_refused_in_words(fields: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        decode_record(changed(**fields))
    assert len(str(caught.value)) > 10


def test_size_is_bounded() -> None:
    with pytest.raises(RecordError, match="bytes"):
        decode_record(b" " * (RECORD_BYTES_MAX + 1))


@given(st.binary(max_size=100))
def test_random_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(body)


def test_several_ranks() -> None:
    ranks = tuple(EventRank(dp_rank=rank, pub=f"ipc:///{rank}") for rank in range(3))
    assert decode_record(encode_record(record(events=EventSource(topic="t", ranks=ranks)))).events is not None


def test_digest_changes_with_every_file_that_decides_tokens(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
    seen = set()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(b"x")
        seen.add(tokenizer_digest(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"xx")
    seen.add(tokenizer_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(tmp_path) in seen
