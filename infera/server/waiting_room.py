"""Where requests wait while every worker that could serve them is saturated.

The order and the limit are the waiting line's (`infera.router.waiting`). Here are the tasks and the clock: whoever is
next in its lane tries again when a request ended, when an engine reported, and every RETRY_INTERVAL_S, because a
predicted queue also drains in time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from infera.router.core import SaturatedError
from infera.router.waiting import Waiter, WaitingFullError, WaitingLine
from infera.server.errors import ApiError, busy
from infera.server.metrics import ServerMetrics

RETRY_INTERVAL_S: Final = 0.1
RETRY_AFTER_S_MAX: Final = 60
Picked = TypeVar("Picked")


class WaitingRoom:
    """Belongs to one event loop. Whatever ends a wait (a worker, the clock, the client), the next one is told."""

    def __init__(self, line: WaitingLine, timeout_s: float, metrics: ServerMetrics) -> None:
        self._line = line
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._wakes: dict[int, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def pick(self, lane: str, priority: int, attempt: Callable[[], Picked]) -> Picked:
        """What ``attempt`` returns, as soon as it does not raise SaturatedError and it is this request's turn.

        Raises ApiError 429 when the line is full or the wait too long.
        """
        free_in_s = 0.0
        if not self._line.has_before(lane, priority):
            try:
                return attempt()
            except SaturatedError as error:
                free_in_s = error.free_in_s
        try:
            waiter, displaced = self._line.join(lane, priority, time.monotonic())
        except WaitingFullError as error:
            self._metrics.waited.labels("refused").observe(0.0)
            raise self._busy(f"all workers are saturated and {error} (--queue-max)", free_in_s) from error
        if displaced is not None:
            self._wakes[displaced.number].set()
        return await self._wait(waiter, attempt)

    def pump(self) -> None:
        """Something may have become free: whoever is next tries again."""
        if self._line.count:
            for head in self._line.heads():
                self._wakes[head.number].set()

    async def _wait(self, waiter: Waiter, attempt: Callable[[], Picked]) -> Picked:
        wake = self._wakes[waiter.number] = asyncio.Event()
        outcome, free_in_s = "gone", 0.0
        self._metrics.waiting.set(self._line.count)
        self._start_timer()
        try:
            async with asyncio.timeout(self._timeout_s):
                while waiter.is_waiting:
                    await wake.wait()
                    wake.clear()
                    if self._line.head(waiter.lane) is not waiter:
                        continue
                    try:
                        picked = attempt()
                    except SaturatedError as error:
                        free_in_s = error.free_in_s
                    else:
                        outcome = "served"
                        return picked
            outcome = "displaced"
            raise self._busy("all workers are saturated and a more urgent request took the place", free_in_s)
        except TimeoutError as error:
            outcome = "timeout"
            text = f"all workers were saturated for {self._timeout_s:g} s (--queue-timeout)"
            raise self._busy(text, free_in_s) from error
        finally:
            self._line.leave(waiter)
            del self._wakes[waiter.number]
            self._metrics.waiting.set(self._line.count)
            self._metrics.waited.labels(outcome).observe(time.monotonic() - waiter.since_s)
            self.pump()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._line.count:
            self.pump()
            self._start_timer()

    def _busy(self, message: str, free_in_s: float) -> ApiError:
        after_s = max(1, min(RETRY_AFTER_S_MAX, math.ceil(free_in_s)))
        return busy(f"{message}; try again in {after_s} s", retry_after_s=after_s)
