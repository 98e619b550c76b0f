"""Records and classes as `infera-kvd ls` shows them: made by the daemon, read by a person or a program."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.events import ClassName
from kvd.retention import RETENTIONS
from kvd.store import Listing

RETENTION_NAMES = tuple(RETENTIONS)


def listed(record: Listing, classes: Mapping[int, ClassName]) -> dict[str, object]:
    """The JSON of one record."""
    return {
        "key": record.key.hex(),
        "group": classes[record.class_id].group,
        "depth_tokens": record.depth_grains * 16,
        "bytes": record.stored_bytes,
        "present": record.is_present,
        "shards": record.shard_mask.bit_count(),
        "retention": retention_name(record.retention),
        "expires_s": record.expires_s,
        "tenant_tag": f"{record.tenant_tag:016x}",
    }


def retention_name(retention: int) -> str:
    """The name of a retention class; its number when it has none."""
    return RETENTION_NAMES[retention] if retention < len(RETENTION_NAMES) else str(retention)
