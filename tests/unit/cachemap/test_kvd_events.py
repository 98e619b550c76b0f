from __future__ import annotations

from typing import Any

import msgspec
import pytest

from infera.cachemap.events import EventFormatError
from infera.cachemap.interface import Tier
from infera.cachemap.kvd_events import KvdChange, KvdCleared, KvdUnknown, decode_kvd_events

A, B = b"a" * 16, b"b" * 16


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode({"ts": 1.0, "events": list(events)})


def change(**fields: Any) -> dict[str, Any]:
    base = {"type": "stored", "tier": "ram", "namespace": "00", "model": "m", "group": 0, "keys": A + B}
    return base | fields


def test_all_kinds() -> None:
    events = decode_kvd_events(
        payload(
            change(), change(type="removed", tier="disk"), {"type": "cleared"}, {"type": "new"}, change(tier="moon")
        )
    )
    assert events == (
        KvdChange("stored", Tier.RAM, "00", 0, (A, B)),
        KvdChange("removed", Tier.DISK, "00", 0, (A, B)),
        KvdCleared(),
        KvdUnknown("new"),
        KvdUnknown("tier moon"),
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"events": 4}),
        payload(3),
        payload(change(keys=b"short")),
        payload(change(keys="text")),
        payload(change(namespace=None)),
    ],
)
def test_anything_else_is_an_error(content: bytes) -> None:
    with pytest.raises(EventFormatError):
        decode_kvd_events(content)
