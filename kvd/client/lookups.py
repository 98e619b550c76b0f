"""Look-ups that are asked again at every step: answered from memory, brought up to date in one call."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable

from infera_core import ffi

from kvd.client.arena import KEY_BYTES
from kvd.client.client import KvdClient, RecordSpec, Session

REMEMBERED_MAX = 4096
"""Questions remembered; at the limit all are forgotten, which costs one look-up each."""
WHOLE_KEYS_MAX = 4096
"""After a removal, keys of remembered runs looked up one by one; the other runs are checked at their end."""


class RepeatedLookups:
    """`probe_run` for requests that wait: an answer holds until a record is stored or removed.

    An engine asks for every waiting request at every step. `name` stands for the question: the same
    name must come with the same spec and keys until it is forgotten. From one thread at a time.

    After records have been removed an answer may be too long by a record in the middle of its run
    for a few steps: pin the run before relying on it. See csrc/lookups.c.
    """

    def __init__(self, client: KvdClient) -> None:
        self._client = client
        self._session: Session | None = None
        self._change_count: Callable[[], int] = _nothing
        self._answers: dict[Hashable, int] = {}
        self._as_of = -1
        self._removed_as_of = -1
        self._names: list[Hashable] = []
        self._places: dict[Hashable, int] = {}
        self._keys: list[bytes] = []
        """Kept because the questions point into them."""
        self._questions = ffi.new("arena_question[]", REMEMBERED_MAX)
        self._turn = ffi.new("uint32_t *")
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
            self._begin(session)
        if session is None:
            return 0
        self._bring_up_to_date(session)
        known = self._answers.get(name)
        if known is None and spec not in session.class_ids:
            return 0  # the daemon does not know the spec yet
        return self._ask_first(session, name, spec, keys) if known is None else known

    def _begin(self, session: Session | None) -> None:
        """Another life of the connection: nothing that is known still counts."""
        self._session = session
        self._change_count = session.arena.change_counter() if session else _nothing
        self._forget_all()

    def _bring_up_to_date(self, session: Session) -> None:
        # Read before the look-ups: what changes in between makes answers older than they say, never newer.
        changes, removals = self._change_count(), session.arena.removed_count()
        if changes == self._as_of:
            return
        if self._names:
            session.arena.ask_again(
                self._questions, len(self._names), removals != self._removed_as_of, WHOLE_KEYS_MAX, self._turn
            )
            questions = self._questions
            self._answers = {name: questions[place].found for place, name in enumerate(self._names)}
        self._as_of, self._removed_as_of = changes, removals

    def _ask_first(self, session: Session, name: Hashable, spec: RecordSpec, keys: bytes) -> int:
        if len(self._names) == REMEMBERED_MAX:
            as_of = self._as_of, self._removed_as_of
            self._forget_all()
            self._as_of, self._removed_as_of = as_of
        class_id = session.class_ids[spec]
        found = session.arena.probe_run(class_id, spec.full_mask, keys) if keys else 0
        place = len(self._names)
        question = self._questions[place]
        question.keys, question.n = ffi.from_buffer("uint8_t[]", keys), len(keys) // KEY_BYTES
        question.class_id, question.full_mask, question.found = class_id, spec.full_mask, found
        self._names.append(name)
        self._keys.append(keys)
        self._places[name] = place
        self._answers[name] = found
        return found

    def forget(self, name: Hashable) -> None:
        """The request is done with."""
        self._answers.pop(name, None)
        place = self._places.pop(name, None)
        if place is None:
            return
        last_name, last_keys = self._names.pop(), self._keys.pop()
        if last_name != name:  # the last question takes its place
            self._names[place], self._keys[place] = last_name, last_keys
            self._questions[place] = self._questions[len(self._names)]
            self._places[last_name] = place

    def _forget_all(self) -> None:
        self._answers.clear()
        self._names.clear()
        self._places.clear()
        self._keys.clear()
        self._as_of = self._removed_as_of = -1


_everyone: weakref.WeakSet[RepeatedLookups] = weakref.WeakSet()


def _nothing() -> int:
    return -2


def _forget_all_in_child() -> None:
    """A forked child is not a client, and must find that out where its parent would have known the answer."""
    for lookups in list(_everyone):
        lookups._session = None
        lookups._forget_all()


os.register_at_fork(after_in_child=_forget_all_in_child)
