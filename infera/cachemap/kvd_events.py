"""kvd's event frames: msgpack maps with the keys of whole records packed into one byte string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from infera_core.keys import KEY_BYTES

from infera.cachemap.events import EVENTS_PER_BATCH_MAX, EventFormatError
from infera.cachemap.interface import Tier

TIERS_BY_NAME: Final = {"ram": Tier.RAM, "disk": Tier.DISK, "peer": Tier.PEER, "store": Tier.PEER}
_DECODER: Final = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class KvdChange:
    """Records that entered or left a tier of one namespace."""

    kind: Literal["stored", "removed"]
    tier: Tier
    namespace: str
    group: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvdCleared:
    """The daemon dropped everything."""


@dataclass(frozen=True, slots=True)
class KvdUnknown:
    """A kind of event or tier this version does not know; counted."""

    kind: str


KvdEvent = KvdChange | KvdCleared | KvdUnknown


def decode_kvd_events(payload: bytes) -> tuple[KvdEvent, ...]:
    """The events of one frame's payload. Raises EventFormatError on anything else."""
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(f"not msgpack: {error}") from error
    events = batch.get("events") if isinstance(batch, Mapping) else None
    if not isinstance(events, list) or len(events) > EVENTS_PER_BATCH_MAX:
        raise EventFormatError("a batch must be a map with its events")
    return tuple(_event(event) for event in events)


def _event(raw: Any) -> KvdEvent:
    if not isinstance(raw, Mapping):
        raise EventFormatError("an event must be a map")
    kind = raw.get("type")
    if kind == "cleared":
        return KvdCleared()
    if kind not in ("stored", "removed"):
        return KvdUnknown(str(kind))
    tier = TIERS_BY_NAME.get(str(raw.get("tier")))
    if tier is None:
        return KvdUnknown(f"tier {raw.get('tier')}")
    keys, namespace, group = raw.get("keys"), raw.get("namespace"), raw.get("group", 0)
    if not isinstance(keys, bytes) or len(keys) % KEY_BYTES or not isinstance(namespace, str) or type(group) is not int:
        raise EventFormatError(f"a {kind} event needs a namespace, a group and keys of {KEY_BYTES} bytes")
    split = tuple(keys[place : place + KEY_BYTES] for place in range(0, len(keys), KEY_BYTES))
    return KvdChange("stored" if kind == "stored" else "removed", tier, namespace, group, split)
