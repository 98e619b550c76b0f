from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from infera.discovery.record import (
    CHAT_TEMPLATE_BYTES_MAX,
    RECORD_BYTES_MAX,
    RecordError,
    RenderProfile,
    decode_record,
    encode_record,
    ids_digest,
)
from tests.support.records import record

SOURCE = "{{ messages }}"
DIGEST = hashlib.sha256(SOURCE.encode()).hexdigest()


def with_render(**fields: Any) -> bytes:
    fields = {"chat_template": SOURCE, "chat_template_digest": DIGEST} | fields
    return json.dumps(json.loads(encode_record(record())) | {"render": fields}).encode()


def test_a_profile_survives_the_way_there_and_back() -> None:
    profile = RenderProfile(
        chat_template=SOURCE, chat_template_digest=DIGEST, template_arguments={"a": [1, None]}, content_format="openai"
    )
    full = msgspec.structs.replace(record(), render=profile)
    assert decode_record(encode_record(full)) == full
    assert decode_record(encode_record(record())).render is None


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "other"},
        {"chat_template_digest": "xyz"},
        {"text_probe_digest": "no hex"},
        {"content_format": "else"},
        {"template_arguments": []},
        {"unrendered_flags": ["-"] * 65},
        {
            "chat_template": "x" * (CHAT_TEMPLATE_BYTES_MAX + 1),
            "chat_template_digest": hashlib.sha256(b"x" * (CHAT_TEMPLATE_BYTES_MAX + 1)).hexdigest(),
        },
    ],
)
def test_profiles_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        decode_record(with_render(**fields))


def test_the_longest_template_fits_a_record() -> None:
    source = "\n" * CHAT_TEMPLATE_BYTES_MAX
    digest = hashlib.sha256(source.encode()).hexdigest()
    profile = RenderProfile(chat_template=source, chat_template_digest=digest)
    encoded = encode_record(msgspec.structs.replace(record(), render=profile))
    assert len(encoded) <= RECORD_BYTES_MAX
    decode_record(encoded)


def test_ids_have_a_digest_of_their_32_bits() -> None:
    assert ids_digest([1, 256]) == hashlib.sha256(b"\x01\0\0\0\0\x01\0\0").hexdigest()
    with pytest.raises(OverflowError):
        ids_digest([2**32])
