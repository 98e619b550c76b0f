"""The control round trip against a bare ping-pong of the same sizes over the same kind of socket, in turn."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from infera_core import lib

from infera.tools.bench.kvd.bare import Bare
from infera.tools.bench.kvd.daemon import BenchDaemon
from kvd import protocol
from kvd.client.connection import ClientConnection
from kvd.protocol import Message
from kvd.retention import RETENTIONS

BATCH = 64
SPEC = {"namespace": "c0" * 16, "group": 0, "model": "bench", "shard_bytes": [4096]}


class Control:
    """A connection that reserves and commits 64 records at a time, without copying anything."""

    def __init__(self, daemon: BenchDaemon) -> None:
        self._connection = ClientConnection.open(daemon.socket, 10.0)
        _, descriptors = self._connection.hello("bench-control")
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)
        opened = protocol.decode_json(self._connection.call(Message.OPEN, protocol.encode_json(SPEC)))
        self._head = protocol.RESERVE_HEAD.pack(opened["class_id"], 0, RETENTIONS["short"], 0, 0, 0)
        self._number = 0
        self.request_bytes = (
            protocol.HEADER.size + protocol.RESERVE_HEAD.size + BATCH * protocol.WISH.size,
            protocol.HEADER.size + BATCH * protocol.COMMITMENT.size,
        )
        self.answer_bytes = (
            protocol.HEADER.size + BATCH * protocol.GRANT.size,
            protocol.HEADER.size + BATCH * protocol.STATUS_CODE.size,
        )

    def round_trips(self) -> float:
        """Seconds of one RESERVE and one COMMIT, from payload to payload."""
        wishes = [protocol.WISH.pack((self._number + i).to_bytes(16, "little"), 1, 0) for i in range(BATCH)]
        payload = self._head + b"".join(wishes)
        self._number += BATCH
        started_s = time.perf_counter()
        grants = self._connection.call(Message.RESERVE, payload)
        reserve_s = time.perf_counter() - started_s
        entries = [(reservation, status) for reservation, _, status, _ in protocol.GRANT.iter_unpack(grants)]
        if any(status != lib.STORE_OK for _, status in entries):
            raise RuntimeError("a reservation was refused in the measurement")
        payload = b"".join(protocol.COMMITMENT.pack(reservation, 0) for reservation, _ in entries)
        started_s = time.perf_counter()
        self._connection.call(Message.COMMIT, payload)
        return reserve_s + time.perf_counter() - started_s

    def close(self) -> None:
        """Leave."""
        self._connection.call(Message.BYE, b"")
        self._connection.close()


def measure_control(daemon: BenchDaemon, bare: Bare, rounds: int) -> dict[str, list[float]]:
    """Seconds of a RESERVE and a COMMIT, and of two bare round trips of their sizes; one sample each a round."""
    control = Control(daemon)
    near, far = socket.socketpair()
    child = os.fork()
    if child == 0:
        near.close()
        bare.serve(far, control.request_bytes, control.answer_bytes)
        os._exit(0)
    far.close()
    samples: dict[str, list[float]] = {"rpc": [], "pingpong": []}
    try:
        for turn in range(rounds + 20):
            pair = (control.round_trips(), _pingpong(near, control.request_bytes, control.answer_bytes))
            if turn >= 20:
                samples["rpc"].append(pair[0])
                samples["pingpong"].append(pair[1])
    finally:
        near.close()
        os.waitpid(child, 0)
    control.close()
    return samples


def _pingpong(sock: socket.socket, request_bytes: tuple[int, ...], answer_bytes: tuple[int, ...]) -> float:
    requests = [bytes(size) for size in request_bytes]
    receive: Callable[[int], bytes] = sock.recv
    started_s = time.perf_counter()
    for request, expected in zip(requests, answer_bytes, strict=True):
        sock.sendall(request)
        while expected > 0:
            expected -= len(receive(1 << 18))
    return time.perf_counter() - started_s
