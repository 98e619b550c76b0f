"""Options and routers for tests of placement."""

from __future__ import annotations

import random
from typing import Any

from infera.cachemap.interface import Match, Tier
from infera.router.core import RouterCore
from infera.router.demand import Demand
from infera.router.place import Option, Place
from infera.router.policy import Policy, PolicySettings, make_policy
from tests.support.records import record

STREAM = Demand(model="m")


def option(number: int, prompt: int = 1600, *, suspect: bool = False, rank: int = 0, **tiers: int) -> Option:
    """Worker ``number`` with so many of the prompt's tokens in each tier."""
    match = Match({Tier[name.upper()]: tokens for name, tokens in tiers.items()})
    return Option(Place(record(number), rank), (match,), (prompt,), suspect)


def core(policy: Policy | str = "kv-aware", *, settings: PolicySettings | None = None, **more: Any) -> RouterCore:
    """A router with its own dice."""
    made = make_policy(policy, settings) if isinstance(policy, str) else policy
    return RouterCore(made, random.Random(7), **more)


def picked(router: RouterCore, options: list[Option], now: float = 0.0, demand: Demand = STREAM) -> str:
    """The worker a pick went to; the request ends at once."""
    decision, ticket = router.pick(options, demand, now=now)
    router.done(ticket, now=now)
    return decision.worker_id
