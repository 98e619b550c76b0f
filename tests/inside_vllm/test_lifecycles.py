"""Random lives of many requests: whatever happens to them and to the daemon, no block is ever another's, and nothing is
left behind. Seeds are printed; `LIFECYCLE_SEED` repeats one."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from infera_vllm.faults import Fault, LoadFaults

from kvd.client.connection import ClientConnection
from kvd.protocol import Message, decode_json
from tests.inside_vllm.fake_vllm import FakeVllm
from tests.inside_vllm.rig import BLOCK_TOKENS, Daemon, Engine, wait_for

STEPS = 1500


def prompts(dice: random.Random) -> list[list[int]]:
    """A few dozen prompts that share beginnings of several lengths."""
    roots = [[dice.randrange(50) for _ in range(dice.randrange(1, 4) * BLOCK_TOKENS)] for _ in range(4)]
    return [
        dice.choice(roots) + [dice.randrange(50) for _ in range(dice.randrange(1, 5 * BLOCK_TOKENS))] for _ in range(24)
    ]


def faults(dice: random.Random) -> LoadFaults:
    kinds = [Fault(fails=True), Fault(corrupts=True), Fault(delay_s=0.05)]
    return LoadFaults({number: dice.choice(kinds) for number in range(1, 4000) if dice.random() < 0.05})


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_no_block_is_ever_anothers(ranks: int, groups: int) -> None:
    seed = int(os.environ.get("LIFECYCLE_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    dice = random.Random(seed)
    daemon = Daemon()
    engines = [Engine(daemon, ranks, groups, seed=number, faults=faults(dice)) for number in range(2)]
    fakes = [FakeVllm(engine, dice) for engine in engines]
    choices = prompts(dice)
    try:
        for step in range(STEPS):
            fake = dice.choice(fakes)
            live(fake, choices, dice)
            if step % 400 == 399:
                disturb(daemon, engines, dice)
        for fake in fakes:
            drain(fake)
        check_the_end(daemon, engines, fakes)
    finally:
        for engine in engines:
            engine.close()
        daemon.clean_up()


def live(fake: FakeVllm, choices: list[list[int]], dice: random.Random) -> None:
    fate = dice.random()
    if fate < 0.35 and len(fake.waiting) < 6:
        fake.add(list(dice.choice(choices)), dice.randrange(0, 2 * BLOCK_TOKENS))
    elif fate < 0.38:
        fake.abort_one()
    elif fate < 0.41:
        fake.preempt_one()
    elif fate < 0.42:
        fake.cached.clear()  # reset_prefix_cache
    if not fake.running:
        time.sleep(0.0005)  # let a load end
    fake.step()


def disturb(daemon: Daemon, engines: list[Engine], dice: random.Random) -> None:
    if dice.random() < 0.5:
        daemon.kill()
        daemon.start()
    else:
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(0.7)  # longer than a client waits for an answer
        daemon.process.send_signal(signal.SIGCONT)
    wait_for(lambda: all(c.session() for engine in engines for c in engine.clients), "the clients are back")


def drain(fake: FakeVllm) -> None:
    for _ in range(20_000):
        if not (fake.waiting or fake.running or fake.loading):
            break
        if not fake.running:
            time.sleep(0.0005)
        if len(fake.free) < 10 and fake.running:
            fake.abort_one()
        fake.step()
    assert not [*fake.waiting, *fake.running, *fake.loading.values()], "requests that never end"
    fake.engine.settle()


def check_the_end(daemon: Daemon, engines: list[Engine], fakes: list[FakeVllm]) -> None:
    for engine in engines:
        assert engine.pins() == 0
        assert engine.scheduler._states == {}
        assert engine.scheduler._uncacheable == set()
        assert len(engine.scheduler._saves) == len(engine.scheduler._loads) == 0
    assert all(len(fake.free) == len(fakes[0].free) for fake in fakes), "blocks leaked in the test itself"
    assert sum(fake.loads_right for fake in fakes) > 20, "hardly anything was loaded"
    assert sum(fake.loads_failed for fake in fakes) > 0, "no load failed"
    wait_for(lambda: counts(daemon)["reservations"] == 0, "no reservation is left")
    assert counts(daemon)["quarantined_bytes"] == 0


def counts(daemon: Daemon) -> dict[str, int]:
    connection = ClientConnection.open(daemon.socket)
    try:
        return dict(decode_json(connection.call(Message.STATUS, b""))["metrics"])
    finally:
        connection.close()
