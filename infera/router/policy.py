"""What a placement policy is, and how one is found by its name.

A policy is a small class in a file of its own. Ours are built in; others come from installed packages through
the entry-point group ``infera.router``: a module with the hook ``infera_router_policies``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import pluggy

from infera.discovery.record import Role
from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.place import Key
from infera.router.scoring import Weights
from kvd.options import did_you_mean

PROJECT: Final = "infera.router"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class OverlapWeights:
    """How much what a worker holds counts (`--kv-overlap-weight`), and for one role where that differs."""

    everywhere: float = 1.0
    prefill: float | None = None
    decode: float | None = None

    def of(self, role: Role) -> float:
        """The weight for picks of a role."""
        own = {"prefill": self.prefill, "decode": self.decode}.get(role)
        return self.everywhere if own is None else own


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy may be told by the server's options."""

    overlap: OverlapWeights = OverlapWeights()


class Policy(Protocol):
    """Chooses among candidates that may all be used; there is always at least one."""

    name: str
    reads_prefixes: bool
    """Whether the policy needs the prompt's tokens. If not, nothing is tokenized for it."""
    reads_text: bool
    """Whether it wants places guessed from the text of earlier prompts where tokens or events are missing."""

    def weights(self, role: Role) -> Weights:
        """How costs are weighed for picks of a role; also what the explanation of a pick shows."""

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """The index of one candidate. Must not keep references to the field."""

    def forget(self, key: Key) -> None:
        """A place is gone for good."""


PolicyFactory = Callable[[PolicySettings], Policy]


class PolicyHooks:
    """Hook specifications of the group ``infera.router``."""

    @hookspec
    def infera_router_policies(self) -> Mapping[str, PolicyFactory]:
        """Policies this package adds, by the name a user gives to ``--router-policy``."""
        raise NotImplementedError


class UnknownPolicyError(ValueError):
    """No installed package has a policy of that name."""


def find_policies() -> dict[str, PolicyFactory]:
    """All policies that are built in or installed."""
    from infera.router.policies import built_in

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicyHooks)
    manager.register(built_in, name="built-in")
    manager.load_setuptools_entrypoints(PROJECT)
    found: dict[str, PolicyFactory] = {}
    for policies in reversed(manager.hook.infera_router_policies()):
        found.update(policies)
    return found


def find_policy(name: str) -> PolicyFactory:
    """The factory of that name. Raises UnknownPolicyError naming the nearest, and those that exist."""
    policies = find_policies()
    if name not in policies:
        nearest = did_you_mean(name, sorted(policies))
        hint = f"; did you mean {nearest}?" if nearest else ""
        raise UnknownPolicyError(f"there is no router policy {name!r}{hint} There are: {', '.join(sorted(policies))}")
    return policies[name]


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy of that name. Raises UnknownPolicyError."""
    return find_policy(name)(settings or PolicySettings())
