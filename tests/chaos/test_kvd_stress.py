"""Client processes and the daemon die at random while blocks are saved and loaded: never a wrong byte, never a leak.

INFERA_TEST_STRESS_S sets how long it runs (default 15 s), INFERA_TEST_SEED repeats a run.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.kvd_daemon import DaemonProcess
from tests.support.kvd_user import SPEC, KvdUser, key_of
from tests.support.processes import wait_until

USERS = 3
KEYS = 2500  # more than fit, so that eviction goes on all the time
DURATION_S = float(os.environ.get("INFERA_TEST_STRESS_S", "15"))
SEED = int(os.environ.get("INFERA_TEST_SEED", random.SystemRandom().randrange(2**32)))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(DURATION_S + 110)]


def use_until_killed(socket_path: Path, seed: int, results: Any, stop: Any) -> None:
    """One client process: saves, loads, holds pins and reservations, and counts what it saw."""
    dice = random.Random(seed)
    user = KvdUser(socket_path, name=f"stress-{seed % 1000}")
    found = damaged = wrong = saved = 0
    while not stop.value:
        start = dice.randrange(KEYS)
        keys = [key_of(number) for number in range(start, start + dice.choice([1, 5, 40]))]
        match dice.randrange(8):
            case 0 | 1 | 2:
                saved += user.save(keys)
            case 3 | 4 | 5:
                loaded = user.load(keys, between=dice.choice([0, 0, 0.002]))
                found, damaged, wrong = found + loaded.found, damaged + loaded.damaged, wrong + loaded.wrong
            case 6:
                user.release()
                user.pin(keys[:5])
            case 7:
                user.client.give_up(user.grants)
                user.grants.clear()
                user.reserve(keys[:5])
        results[0], results[1], results[2], results[3] = found, damaged, wrong, saved
    user.release()
    user.client.give_up(user.grants)
    user.client.close()


class Stress:
    """The processes, and what they reported before they died."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.dice = random.Random(SEED)
        self.context = multiprocessing.get_context("spawn")
        self.daemon = daemon
        # Without a lock: a process that is killed while it holds one keeps it for ever.
        self.stop = self.context.RawValue(ctypes.c_bool, False)
        self.running: list[tuple[BaseProcess, Any]] = []
        self.totals = [0, 0, 0, 0]

    def start_user(self) -> None:
        results = self.context.Array("Q", 4, lock=False)
        arguments = (self.daemon.socket, self.dice.randrange(2**32), results, self.stop)
        process = self.context.Process(target=use_until_killed, args=arguments)
        process.start()
        self.running.append((process, results))

    def reap(self, process: BaseProcess, results: Any) -> None:
        process.join(30)
        self.totals = [total + int(new) for total, new in zip(self.totals, results, strict=True)]

    def kill_user(self) -> None:
        process, results = self.running.pop(self.dice.randrange(len(self.running)))
        assert process.is_alive(), f"a client ended by itself with {process.exitcode}"
        process.kill()
        self.reap(process, results)

    def end(self) -> None:
        self.stop.value = True
        for process, results in self.running:
            self.reap(process, results)
            assert process.exitcode == 0
        self.running.clear()

    def disturb(self) -> str:
        """One random misfortune."""
        match self.dice.randrange(6):
            case 0:
                self.daemon.kill()
                time.sleep(self.dice.choice([0, 0.3]))
                self.daemon.start()
                return "daemon killed"
            case 1:
                self.daemon.send(signal.SIGSTOP)
                time.sleep(0.8)
                self.daemon.send(signal.SIGCONT)
                return "daemon frozen"
            case _:
                self.kill_user()
                self.start_user()
                return "client killed"


def is_at_rest(daemon: DaemonProcess) -> bool:
    metrics = daemon.metrics()
    return metrics["clients"] == metrics["reservations"] == metrics["quarantined_bytes"] == 0


def test_stress() -> None:
    print(f"seed {SEED}: repeat with INFERA_TEST_SEED={SEED}")
    daemon = DaemonProcess().start()
    stress = Stress(daemon)
    happened: dict[str, int] = {}
    try:
        for _ in range(USERS):
            stress.start_user()
        end_s = time.monotonic() + DURATION_S
        while time.monotonic() < end_s:
            time.sleep(stress.dice.uniform(0.2, 1.2))
            what = stress.disturb()
            happened[what] = happened.get(what, 0) + 1
            assert daemon.status(audit=True)["audit"] is None
        stress.end()
        found, damaged, wrong, saved = stress.totals
        print(f"{happened} found {found} damaged {damaged} wrong {wrong} saved {saved}")
        assert wrong == 0
        assert damaged == 0
        assert found > 0
        assert saved > 0
        wait_until(lambda: is_at_rest(daemon), "all that the dead held is free")
        assert daemon.status(audit=True)["audit"] is None
        present = daemon.metrics()["records_present"]
        if daemon.status()["classes"]:  # none when the daemon began anew just before the end
            assert daemon.drop(SPEC.namespace) == present  # nothing is pinned any more
        assert daemon.metrics()["used_bytes"] == 0
        assert list(daemon.arena.glob("*.ledger")) == []
        assert "Traceback" not in daemon.log_text()
    finally:
        stress.stop.value = True
        for process, _ in stress.running:
            process.kill()
            process.join()
        daemon.clean_up()
