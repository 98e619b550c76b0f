"""Look-ups that are asked again at every step, answered from memory while nothing has changed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable

from kvd.client.client import KvdClient, RecordSpec, Session

REMEMBERED_MAX = 4096
"""Questions remembered; at the limit all are forgotten, which costs one look-up each."""


class RepeatedLookups:
    """`probe_run` for requests that wait: an answer holds until a record is stored or removed.

    An engine asks for every waiting request at every step. `name` stands for the question: the same
    name must come with the same spec and keys until it is forgotten. From one thread at a time.
    """

    def __init__(self, client: KvdClient) -> None:
        self._client = client
        self._session: Session | None = None
        self._change_count: Callable[[], int] = _nothing
        self._answers: dict[Hashable, int] = {}
        self._as_of = -1
        _everyone.add(self)

    def probe_run(self, name: Hashable, spec: RecordSpec, keys: bytes) -> int:
        """Number of leading keys present with all shards; 0 without a daemon."""
        # This path is taken hundreds of times a step, hence no calls that can be done without.
        if self._session is self._client._session and self._change_count() == self._as_of:
            known = self._answers.get(name)
            if known is not None:
                return known
        return self._look_up(name, spec, keys)

    def _look_up(self, name: Hashable, spec: RecordSpec, keys: bytes) -> int:
        session = self._client.session()
        if session is not self._session:
            self._session = session
            self._change_count = session.arena.change_counter() if session else _nothing
            self._as_of = -1
        if session is None:
            return 0
        # Read before the look-up: what changes in between makes the answer older than it says, never newer.
        count = self._change_count()
        if count != self._as_of or len(self._answers) >= REMEMBERED_MAX:
            self._answers.clear()
            self._as_of = count
        found = session.arena.probe_run(session.class_ids[spec], spec.full_mask, keys) if keys else 0
        self._answers[name] = found
        return found

    def forget(self, name: Hashable) -> None:
        """The request is done with."""
        self._answers.pop(name, None)


_everyone: weakref.WeakSet[RepeatedLookups] = weakref.WeakSet()


def _nothing() -> int:
    return -2


def _forget_all_in_child() -> None:
    """A forked child is not a client, and must find that out where its parent would have known the answer."""
    for lookups in list(_everyone):
        lookups._answers.clear()
        lookups._as_of = -1


os.register_at_fork(after_in_child=_forget_all_in_child)
