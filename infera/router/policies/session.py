"""session: the same worker for the same X-Session-ID, agreed upon by all routers without shared state.

Rendezvous hashing: every (session, worker) has a number, the highest wins. A worker that joins takes its share of
sessions from all others, one that leaves gives its sessions to all others, and nothing else moves. A worker with
more than its bounded share of the load is passed over for the next in the session's own order.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Final

from infera.router.demand import Demand
from infera.router.field import Field
from infera.router.policies.base import BasePolicy
from infera.router.policies.least_loaded import WEIGHTS
from infera.router.ties import cheapest

LOAD_SHARE_MAX: Final = 2.0
LOAD_SLACK_S: Final = 0.25


class Session(BasePolicy):
    """Consistent hashing with bounded load; requests without a session go to the least loaded."""

    name = "session"

    def choose(self, field: Field, demand: Demand, rng: random.Random) -> int:
        """The first in the session's order that is not overloaded."""
        loads_s = field.costs(WEIGHTS).cost_s
        session = demand.session
        if session is None:
            return cheapest(loads_s, rng)
        limit_s = LOAD_SHARE_MAX * sum(loads_s) / len(loads_s) + LOAD_SLACK_S
        allowed = [index for index, load_s in enumerate(loads_s) if load_s <= limit_s]
        return max(allowed, key=lambda index: _number(field, index, session))


def _number(field: Field, index: int, session: bytes) -> bytes:
    place = field.place(index)
    return blake2b(session + f"\0{place.worker_id}\0{place.dp_rank}".encode(), digest_size=8).digest()
