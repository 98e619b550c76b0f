from __future__ import annotations

from typing import Any

import pytest

from infera.discovery.embedded import (
    EmbeddedRegistry,
    EndedIncarnationError,
    RegistryFullError,
    TokenizerConflictError,
)
from infera.discovery.record import RankLoad, WorkerRecord
from tests.support.records import record


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def worker_joined(self, record: WorkerRecord) -> None:
        self.heard.append(("joined", record.worker_id))

    def worker_changed(self, old: WorkerRecord, new: WorkerRecord) -> None:
        self.heard.append(("changed", new.worker_id))

    def worker_beat(self, record: WorkerRecord) -> None:
        self.heard.append(("beat", record.worker_id))

    def worker_left(self, record: WorkerRecord, reason: str) -> None:
        self.heard.append(("left", record.worker_id))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def registry(clock: Clock, listener: Listener) -> Any:
    made = EmbeddedRegistry(clock=clock, workers_max=3)
    await made.start(listener)
    yield made
    await made.stop()


def test_register_renew_and_expire(registry: EmbeddedRegistry, clock: Clock, listener: Listener) -> None:
    assert registry.put(record(1)) is False
    clock.now_s += 5
    assert registry.put(record(1)) is True
    clock.now_s += 5
    assert registry.expire() == 0
    clock.now_s += 1.5
    assert registry.expire() == 1
    assert not registry.workers()
    assert registry.put(record(1)) is False, "an expired lease comes back with the next heartbeat"
    assert [what for what, _ in listener.heard] == ["joined", "beat", "left", "joined"]


def test_a_changed_record_is_told(registry: EmbeddedRegistry, listener: Listener) -> None:
    registry.put(record(1))
    registry.put(record(1, max_context_tokens=5))
    assert listener.heard == [("joined", "worker-1"), ("changed", "worker-1"), ("beat", "worker-1")]


def test_deregistering_is_idempotent_and_a_late_heartbeat_does_not_undo_it(
    registry: EmbeddedRegistry, clock: Clock
) -> None:
    registry.put(record(1))
    assert registry.delete(record(1).incarnation) is True
    assert registry.delete(record(1).incarnation) is False
    with pytest.raises(EndedIncarnationError):
        registry.put(record(1))
    clock.now_s += registry.lease_ttl_s + 1
    registry.put(record(1))


def test_lmcache_4642_a_restart_faster_than_a_heartbeat_is_noticed(
    registry: EmbeddedRegistry, listener: Listener
) -> None:
    """LMCache#4642: a server that restarts faster than a heartbeat is never noticed."""
    old, new = record(1), record(2, worker_id="worker-1")
    registry.put(old)
    registry.put(new)
    assert list(registry.workers()) == [new.incarnation]
    assert listener.heard == [("joined", "worker-1"), ("left", "worker-1"), ("joined", "worker-1")]
    with pytest.raises(EndedIncarnationError):
        registry.put(old)


def test_one_name_with_two_tokenizers_is_refused(registry: EmbeddedRegistry) -> None:
    registry.put(record(1, tokenizer_digest="aa"))
    with pytest.raises(TokenizerConflictError, match="worker-1"):
        registry.put(record(2, tokenizer_digest="bb"))
    registry.put(record(2, tokenizer_digest="bb", model="other"))
    registry.put(record(3, worker_id="worker-1", tokenizer_digest="cc"))


def test_workers_are_bounded(registry: EmbeddedRegistry) -> None:
    for number in range(1, 4):
        registry.put(record(number))
    assert registry.problems()
    with pytest.raises(RegistryFullError):
        registry.put(record(4))
    assert registry.put(record(1)) is True
    registry.put(record(5, worker_id="worker-1"))
    assert len(registry.workers()) == 3


async def test_another_load_is_a_heartbeat_and_no_change(clock: Clock, listener: Listener) -> None:
    registry = EmbeddedRegistry(clock=clock)
    await registry.start(listener)
    for running in range(3):
        registry.put(record(1, load=(RankLoad(running_requests=running),)))
    registry.put(record(1, aliases=("a",), load=(RankLoad(running_requests=2),)))
    await registry.stop()
    assert [what for what, _ in listener.heard] == ["joined", "beat", "beat", "changed", "beat"]
