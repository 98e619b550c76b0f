"""What most policies share: nothing kept, nothing read, plain weights."""

from __future__ import annotations

from infera.discovery.record import Role
from infera.router.place import Key
from infera.router.policy import PolicySettings
from infera.router.scoring import Weights

PLAIN = Weights()


class BasePolicy:
    """A policy without state that neither tokenizes nor looks at text."""

    reads_prefixes = False
    reads_text = False

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()

    def weights(self, role: Role) -> Weights:
        """Every part of the cost counts once."""
        del role
        return PLAIN

    def forget(self, key: Key) -> None:
        """Nothing is kept."""
