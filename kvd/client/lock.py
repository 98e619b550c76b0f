"""How a daemon that was started anew learns which of its clients still live.

A client holds a file lock on its ledger for as long as the process lives. The lock belongs to an open file that the
daemon opened for this client alone; a forked child, which is not a client, closes its copy of the descriptor.
"""

from __future__ import annotations

import fcntl
import os
import weakref


class LedgerLock:
    """The lock, held as long as this object lives. Takes ownership of the descriptor.

    Raises:
        OSError: when somebody else has it: a daemon that found the ledger before it was locked, and removes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise
        _held.add(self)

    def close(self) -> None:
        """Close the descriptor, which gives the lock up unless another process shares the open file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakSet[LedgerLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
