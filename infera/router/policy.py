"""What a placement policy is, and how one is found by its name.

A policy is a small class in a file of its own. Ours are built in; others come from installed packages through
the entry-point group ``infera.router``: a module with the hook ``infera_router_policies``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pluggy

from infera.router.cost import Candidate, Cost

PROJECT: Final = "infera.router"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate a policy picked, and what it thought each would cost (None where it does not predict)."""

    index: int
    costs: tuple[Cost, ...] | None = None


class Policy(Protocol):
    """Chooses among candidates that may all be used; there is always at least one."""

    name: str
    reads_prefixes: bool
    """Whether the policy needs the prompt's tokens. If not, nothing is tokenized for it."""

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Pick one. Must not keep references to the candidates."""


PolicyFactory = Callable[[], Policy]


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


def make_policy(name: str) -> Policy:
    """A new policy of that name. Raises UnknownPolicyError naming those that exist."""
    policies = find_policies()
    if name not in policies:
        raise UnknownPolicyError(f"there is no router policy {name!r}; there are {', '.join(sorted(policies))}")
    return policies[name]()
