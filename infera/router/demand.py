"""What a request asks of placement, beyond its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from infera.discovery.record import Role

Retention = Literal["none", "short", "long"]
RETENTIONS: Final[tuple[Retention, ...]] = ("none", "short", "long")
PRIORITY_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Demand:
    """One pick for one request.

    ``priority``: the smaller, the earlier out of the waiting line, as engines read the field of that name.
    ``retention``: how long the client expects its blocks to be read again; ``none`` means never.
    """

    model: str = ""
    role: Role = "mixed"
    is_streaming: bool = True
    session: bytes | None = None
    priority: int = 0
    retention: Retention | None = None
    is_forced: bool = False
    """The client named the worker, so there is nothing to choose and nothing to wait for."""
    is_retry: bool = False
    """It was tried elsewhere before: it does not wait again, and its time says nothing about this worker."""


def priority_of(body: Mapping[str, Any]) -> int:
    """The request's priority, 0 where it names none that is a whole number; the engine judges odd ones."""
    value = body.get("priority")
    if type(value) is not int:
        return 0
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, value))


def retention_of(body: Mapping[str, Any]) -> Retention | None:
    """The hint ``kv_transfer_params.infera_retention``; None where there is none that is known."""
    parameters = body.get("kv_transfer_params")
    value = parameters.get("infera_retention") if isinstance(parameters, Mapping) else None
    return next((known for known in RETENTIONS if known == value), None)
