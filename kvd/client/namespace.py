"""Fingerprints that name what may share cached blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

NAMESPACE_BYTES = 16


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """16 bytes over a mapping of names to JSON values; the order of names does not matter.

    Raises:
        TypeError: when a value is not JSON.
    """
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(canonical.encode(), digest_size=NAMESPACE_BYTES, person=b"infera-namespace").digest()
