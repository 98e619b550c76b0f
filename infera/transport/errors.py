"""What can go wrong between the router and a worker."""

from __future__ import annotations


class TransportError(Exception):
    """The worker could not be reached or broke off. ``reason`` is a short stable label for metrics."""

    reason = "transport"


class ConnectError(TransportError):
    """No connection: refused, unreachable, or too slow to accept."""

    reason = "connect"


class ConnectionLostError(TransportError):
    """The connection broke before the answer was complete."""

    reason = "connection_lost"


class FirstByteTimeoutError(TransportError):
    """No answer began in time."""

    reason = "first_byte_timeout"


class IdleTimeoutError(TransportError):
    """An answer began and then stood still."""

    reason = "idle_timeout"


class ProtocolError(TransportError):
    """What came is not HTTP/1.1 as we speak it, or larger than we accept."""

    reason = "protocol"


class PoolFullError(TransportError):
    """The worker has as many connections as we allow."""

    reason = "pool_full"
