"""Turns the first SIGINT or SIGTERM into an exception in the main thread, and ignores the following ones."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Somebody wants this program to end. Not an Exception, so that no handler takes it for a failure."""


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """While the block runs, the first signal raises StopRequested; clean-up is not interrupted by impatience."""

    def request(_number: int, _frame: FrameType | None) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise StopRequested

    before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
