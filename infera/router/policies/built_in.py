"""Registers the built-in policies."""

from __future__ import annotations

from collections.abc import Mapping

from infera.router.policies.kv_aware import KvAware
from infera.router.policies.least_loaded import LeastLoaded
from infera.router.policies.random_choice import RandomChoice
from infera.router.policies.round_robin import RoundRobin
from infera.router.policies.session import Session
from infera.router.policies.text_prefix import TextPrefix
from infera.router.policy import PolicyFactory, hookimpl


@hookimpl
def infera_router_policies() -> Mapping[str, PolicyFactory]:
    """The policies of this package by name."""
    return {policy.name: policy for policy in (KvAware, RoundRobin, LeastLoaded, RandomChoice, Session, TextPrefix)}
