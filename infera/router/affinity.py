"""Session affinity: which place a session's requests go to, for each role.

A *binding* names a target for (model, role, session). A *lease* is one request under way on it: while there is any,
the binding cannot expire; its idle time counts from the end of the last one. Every new target is a new generation,
and a failure ends only the generation it happened on, so an old failure cannot delete a newer binding.

At the limit nothing is evicted: a new session gets normal routing until others expire. Guarantee: leases are never
counted below zero, and there are never more than the limit's bindings.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

from infera.discovery.record import ROLES, Role
from infera.router.place import Key

AffinityMode = Literal["off", "prefill", "both"]
AFFINITY_MODES: Final[tuple[AffinityMode, ...]] = ("off", "prefill", "both")
BINDINGS_MAX: Final = 65_536
TTL_S_DEFAULT: Final = 3_600.0
TTL_S_MIN: Final = 1.0
TTL_S_MAX: Final = 86_400.0
SESSION_BYTES_MAX: Final = 1_024

_ROLES: Final[dict[AffinityMode, frozenset[Role]]] = {
    "off": frozenset(),
    "prefill": frozenset({"prefill"}),
    "both": frozenset(ROLES),
}


class SessionIdError(ValueError):
    """The session's name cannot be used; the text says why."""


def check_session_id(values: list[bytes]) -> bytes | None:
    """The one value of the request's session headers, None where there is none. Raises SessionIdError."""
    if not values:
        return None
    if len(values) > 1:
        raise SessionIdError(f"X-Session-ID is given {len(values)} times; give it once")
    if not values[0]:
        raise SessionIdError("X-Session-ID is empty; leave it out, or name the session")
    if len(values[0]) > SESSION_BYTES_MAX:
        raise SessionIdError(f"X-Session-ID has {len(values[0])} bytes; {SESSION_BYTES_MAX} are the most")
    return values[0]


@dataclass(slots=True)
class _Binding:
    target: Key
    generation: int
    leases: int = 0
    idle_since_s: float = 0.0


@dataclass(slots=True)
class Lease:
    """One request under way on a binding."""

    scope: bytes
    role: Role
    generation: int
    is_over: bool = False


class SessionTable:
    """Bindings of one router process. The caller's clock never goes back."""

    def __init__(
        self, mode: AffinityMode = "off", ttl_s: float = TTL_S_DEFAULT, bindings_max: int = BINDINGS_MAX
    ) -> None:
        self.mode: AffinityMode = mode
        self._ttl_s = ttl_s
        self._bindings_max = bindings_max
        self._bindings: dict[bytes, _Binding] = {}
        # Bindings without a lease, the one that expires next first.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._generation = 0
        self.counts: Counter[tuple[str, Role]] = Counter()
        """(what happened, role): hits, selected, fallbacks, invalidated."""
        self.expired = 0
        self.active_leases: Counter[Role] = Counter()

    def __len__(self) -> int:
        return len(self._bindings)

    def covers(self, role: Role) -> bool:
        """Whether picks of this role are bound."""
        return role in _ROLES[self.mode]

    def target(self, scope: bytes, now_s: float) -> Key | None:
        """Where the session goes, if it is bound."""
        self._expire(now_s)
        binding = self._bindings.get(scope)
        return binding.target if binding is not None else None

    def hit(self, scope: bytes, role: Role) -> Lease:
        """A request goes where the session is bound."""
        self.counts["hits", role] += 1
        return self._lease(scope, role, self._bindings[scope])

    def select(self, scope: bytes, role: Role, target: Key) -> Lease | None:
        """A target was chosen for the session, new or instead of one that is gone; None at the limit."""
        binding = self._bindings.get(scope)
        if binding is None:
            if len(self._bindings) >= self._bindings_max:
                self.counts["fallbacks", role] += 1
                return None
            binding = self._bindings[scope] = _Binding(target, 0)
        self._generation += 1
        binding.target, binding.generation, binding.leases = target, self._generation, 0
        self.counts["selected", role] += 1
        return self._lease(scope, role, binding)

    def release(self, lease: Lease, now_s: float) -> None:
        """The request ended. Does nothing the second time."""
        if self._end(lease):
            binding = self._bindings.get(lease.scope)
            if binding is not None and binding.generation == lease.generation:
                binding.leases -= 1
                if binding.leases == 0:
                    binding.idle_since_s = now_s
                    self._idle[lease.scope] = None

    def invalidate(self, lease: Lease) -> None:
        """The request failed where the session is bound: choose anew, unless that has happened already."""
        if self._end(lease):
            binding = self._bindings.get(lease.scope)
            if binding is not None and binding.generation == lease.generation:
                del self._bindings[lease.scope]
                self.counts["invalidated", lease.role] += 1

    def _lease(self, scope: bytes, role: Role, binding: _Binding) -> Lease:
        self._idle.pop(scope, None)
        binding.leases += 1
        self.active_leases[role] += 1
        return Lease(scope, role, binding.generation)

    def _end(self, lease: Lease) -> bool:
        if lease.is_over:
            return False
        lease.is_over = True
        self.active_leases[lease.role] -= 1
        return True

    def _expire(self, now_s: float) -> None:
        while self._idle:
            scope = next(iter(self._idle))
            if self._bindings[scope].idle_since_s + self._ttl_s > now_s:
                return
            del self._idle[scope]
            del self._bindings[scope]
            self.expired += 1


def scope_of(model: str, role: Role, session: bytes) -> bytes:
    """16 bytes for one session of a model and role; ids may be long, so only their digest is kept."""
    digest = blake2b(digest_size=16)
    for part in (model.encode(), role.encode(), session):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()
