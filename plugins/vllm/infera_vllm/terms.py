"""What a request says about its blocks, in `kv_transfer_params`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RETENTIONS: Final = ("none", "short", "long")
TTL_S_MAX: Final = 365 * 24 * 3600
SAID_MAX: Final = 64

log = logging.getLogger("infera.vllm")
_said: set[str] = set()


@dataclass(frozen=True)
class Terms:
    """How long kvd should keep the request's blocks, and whether the request may use kept ones."""

    retention: str = "short"
    ttl_s: int | None = None
    no_load: bool = False

    @property
    def saves(self) -> bool:
        """Whether anything of the request is kept."""
        return self.retention != "none"


DEFAULT: Final = Terms()


def terms_of(parameters: object) -> Terms:
    """The terms in a request's `kv_transfer_params`. What is not understood is said once and left out."""
    if not isinstance(parameters, Mapping):
        return DEFAULT
    retention = parameters.get("infera_retention", DEFAULT.retention)
    if retention not in RETENTIONS:
        _say("infera_retention", retention, f"one of {', '.join(RETENTIONS)}")
        retention = DEFAULT.retention
    ttl_s = parameters.get("infera_ttl_seconds")
    if ttl_s is not None and not (_is_whole(ttl_s) and 1 <= ttl_s <= TTL_S_MAX):
        _say("infera_ttl_seconds", ttl_s, f"a whole number of seconds from 1 to {TTL_S_MAX}")
        ttl_s = None
    no_load = parameters.get("infera_no_load", False)
    if not isinstance(no_load, bool):
        _say("infera_no_load", no_load, "true or false")
        no_load = False
    return Terms(retention, ttl_s, no_load)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _say(name: str, value: object, wanted: str) -> None:
    """Once for each name, so that a client in a loop does not fill the log."""
    if name not in _said and len(_said) < SAID_MAX:
        _said.add(name)
        log.warning("kv_transfer_params.%s is %.80r and is ignored: it should be %s", name, value, wanted)
