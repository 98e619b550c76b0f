"""Accounting of a request that is prefilled at one place and decoded at another.

With `decode` (the default) both places carry the request until decode ends. With `completion` the prefill place is
free of it once its complete response was read: response headers alone say nothing about the work behind them. This
changes the load that later picks see, not who owns KV blocks.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from infera.router.load import Ticket

GuardRelease = Literal["decode", "completion"]
GUARD_RELEASES: Final[tuple[GuardRelease, ...]] = ("decode", "completion")


class Accounts(Protocol):
    """What releases tickets: the router's core."""

    def first_token(self, ticket: Ticket, *, now: float) -> None:
        """Its prefill is over."""

    def done(self, ticket: Ticket, *, now: float) -> None:
        """It ended well, or by the client's wish."""

    def failed(self, ticket: Ticket, *, now: float) -> None:
        """It was not served."""


class PairAccount:
    """Both legs of one request. Whatever happens, each ticket is released exactly once."""

    def __init__(self, accounts: Accounts, prefill: Ticket, decode: Ticket, release: GuardRelease = "decode") -> None:
        self._accounts = accounts
        self._prefill = prefill
        self._decode = decode
        self._release = release

    def prefill_consumed(self, *, now: float) -> None:
        """Prefill's complete response was read."""
        if self._release == "completion":
            self._accounts.done(self._prefill, now=now)

    def prefill_failed(self, *, now: float) -> None:
        """Prefill failed, or reading its response was given up."""
        self._accounts.failed(self._prefill, now=now)

    def first_token(self, *, now: float) -> None:
        """Decode sent its first data."""
        self._accounts.first_token(self._decode, now=now)

    def done(self, *, now: float) -> None:
        """Decode ended well, or the client left."""
        self._accounts.done(self._decode, now=now)
        self._accounts.done(self._prefill, now=now)

    def decode_failed(self, *, now: float) -> None:
        """Decode failed, so nothing is left of the request on either side. Only decode's session is to blame."""
        self._accounts.failed(self._decode, now=now)
        self._accounts.done(self._prefill, now=now)
