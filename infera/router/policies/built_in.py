"""Registers the built-in policies."""

from __future__ import annotations

from collections.abc import Mapping

from infera.router.policies.kv_aware import KvAware
from infera.router.policies.round_robin import RoundRobin
from infera.router.policy import PolicyFactory, hookimpl


@hookimpl
def infera_router_policies() -> Mapping[str, PolicyFactory]:
    """The policies of this package by name."""
    return {KvAware.name: KvAware, RoundRobin.name: RoundRobin}
