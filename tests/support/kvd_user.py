"""An engine in miniature: saves and loads blocks whose bytes follow from their keys, through kvd's real client.

`python -m tests.support.kvd_user SOCKET` does what JSON lines on its input say and answers with JSON lines, so that
a test can drive several client processes and kill them.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvd.client.arena import Location
from kvd.client.arrays import put_buffer
from kvd.client.client import Grant, KvdClient, PinnedRun, RecordSpec
from kvd.client.copier import CpuCopier, Segment
from tests.support.processes import wait_until

BLOCKS = 32
SPEC = RecordSpec(b"namespace-number", 0, (40_000,), "test-model")
ROOT = Path(__file__).parents[2]


def key_of(number: int) -> bytes:
    """The key of block `number`."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def content_of(key: bytes, size: int) -> bytes:
    """The only right bytes for a key."""
    return hashlib.shake_128(key).digest(64) * (size // 64) + bytes(size % 64)


def put_and_wait(user: KvdUser, key: bytes, content: object) -> None:
    """Save an object of SPEC, and wait until it is in the index."""
    assert put_buffer(user.client, SPEC, key, content)
    wait_until(lambda: user.client.probe_run(SPEC, key) == 1, "the record is present")


def location(run: PinnedRun, slot: int) -> Location:
    """Where the only shard of a pinned record lies."""
    found = run.arena.locate(slot, 0)
    assert found is not None
    return found


@dataclass
class Loaded:
    """What a load came to: records found, refused by their checksum, and wrong but accepted (never)."""

    found: int = 0
    damaged: int = 0
    wrong: int = 0


class KvdUser:
    """One client process's use of kvd. Blocks lie in two segments, as layers of a model do."""

    def __init__(self, socket_path: Path, spec: RecordSpec = SPEC, name: str = "user") -> None:
        self.client = KvdClient(socket_path, name, [spec])
        self.client.start()
        self.spec = spec
        self.size = spec.shard_bytes[0]
        self._first = self.size // 3
        self._memory = [ctypes.create_string_buffer(BLOCKS * part) for part in (self._first, self.size - self._first)]
        sizes = (self._first, self.size - self._first)
        self._copier = CpuCopier(
            [Segment(ctypes.addressof(m), part, part) for m, part in zip(self._memory, sizes, strict=True)]
        )
        self.runs: list[PinnedRun] = []
        self.grants: list[Grant] = []

    def save(self, keys: Sequence[bytes]) -> int:
        """Save what is missing; returns how many records were accepted."""
        accepted = 0
        for start in range(0, len(keys), BLOCKS):
            batch = keys[start : start + BLOCKS]
            grants = self.client.reserve(self.spec, 0, batch, [1] * len(batch))
            accepted += self.client.commit(grants, self.copy(grants, batch))
        return accepted

    def copy(self, grants: Sequence[Grant], keys: Sequence[bytes]) -> list[int]:
        """Write the right bytes where it was granted."""
        for block, grant in enumerate(grants):
            self._put(block, content_of(keys[grant.position], self.size))
        return self._copier.save(range(len(grants)), [grant.address for grant in grants])

    def load(self, keys: Sequence[bytes], *, between: float = 0) -> Loaded:
        """Load the leading records that are present and look at every byte."""
        loaded = Loaded()
        for start in range(0, len(keys), BLOCKS):
            batch = keys[start : start + BLOCKS]
            run = self.client.pin_run(self.spec, b"".join(batch))
            if run is None:
                break
            time.sleep(between)
            places = [location(run, slot) for slot in run.slots]
            sums = self._copier.load(range(len(places)), [run.arena.data_address + p.offset_bytes for p in places])
            damaged = []
            for block, place in enumerate(places):
                loaded.found += 1
                if sums[block] != place.checksum:
                    damaged.append(batch[block])
                elif self._get(block) != content_of(batch[block], self.size):
                    loaded.wrong += 1
            run.release()
            if damaged:
                loaded.damaged += len(damaged)
                self.client.report_damaged(self.spec, b"".join(damaged))
            if len(run.slots) < len(batch):
                break
        return loaded

    def pin(self, keys: Sequence[bytes]) -> int:
        """Pin and hold; returns how many records."""
        run = self.client.pin_run(self.spec, b"".join(keys))
        if run is None:
            return 0
        self.runs.append(run)
        return len(run.slots)

    def release(self) -> None:
        """Give all held pins back."""
        while self.runs:
            self.runs.pop().release()

    def reserve(self, keys: Sequence[bytes]) -> int:
        """Reserve and hold; returns how many records."""
        grants = self.client.reserve(self.spec, 0, keys, [1] * len(keys))
        self.grants += grants
        return len(grants)

    def probe(self, keys: Sequence[bytes]) -> int:
        """Leading records that are present."""
        return self.client.probe_run(self.spec, b"".join(keys))

    def scribble(self, seconds: float) -> int:
        """Write over all that was granted again and again, then commit; returns how many were accepted."""
        until = time.monotonic() + seconds
        sums: list[int] = []
        while time.monotonic() < until or not sums:
            for block in range(BLOCKS):
                self._put(block, b"\xee" * self.size)
            sums = self._copier.save([i % BLOCKS for i in range(len(self.grants))], [g.address for g in self.grants])
        grants, self.grants = self.grants, []
        return self.client.commit(grants, sums)

    def pins_held(self) -> int:
        """Pins of this process in its present ledger."""
        session = self.client.session()
        return session.arena.pins_held() if session else 0

    def _put(self, block: int, content: bytes) -> None:
        sizes = (self._first, self.size - self._first)
        parts = (content[: self._first], content[self._first :])
        for memory, size, part in zip(self._memory, sizes, parts, strict=True):
            ctypes.memmove(ctypes.addressof(memory) + block * size, part, size)

    def _get(self, block: int) -> bytes:
        sizes = (self._first, self.size - self._first)
        parts = [
            ctypes.string_at(ctypes.addressof(memory) + block * size, size)
            for memory, size in zip(self._memory, sizes, strict=True)
        ]
        return b"".join(parts)


class UserProcess:
    """A `KvdUser` in a process of its own."""

    def __init__(self, socket_path: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kvd_user", str(socket_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def begin(self, action: str, *numbers: int) -> None:
        """Start an action on the blocks with these numbers."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([action, *numbers]) + "\n")
        self.popen.stdin.flush()

    def result(self) -> Any:
        """The answer of the action begun first. Fails when the process died."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the client process ended with {self.popen.wait(10)}"
        return json.loads(line)

    def do(self, action: str, *numbers: int) -> Any:
        """An action and its answer."""
        self.begin(action, *numbers)
        return self.result()

    def kill(self) -> None:
        """End it at once, with whatever it holds."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def act(user: KvdUser, action: str, numbers: Sequence[int]) -> Any:
    """One line of the input."""
    keys = [key_of(number) for number in numbers]
    match action:
        case "save" | "pin" | "reserve" | "probe":
            return getattr(user, action)(keys)
        case "load":
            return asdict(user.load(keys))
        case "release" | "pins_held":
            return getattr(user, action)()
        case "is_connected":
            return user.client.session() is not None
        case "connects":
            return user.client.connects_total
        case "arena":
            session = user.client.session()
            return session and id(session.arena)
        case "scribble":
            return user.scribble(seconds=numbers[0])
        case "finish_copy":  # what was reserved is written and committed now, whatever happened meanwhile
            gc.collect()
            grants, user.grants = user.grants, []
            return user.client.commit(grants, user.copy(grants, keys))
        case "fork":
            return in_a_forked_child(user, keys)
        case "leave_a_child":
            return leave_a_child()
        case "close":
            return user.client.close()
    raise ValueError(action)


def in_a_forked_child(user: KvdUser, keys: Sequence[bytes]) -> list[Any]:
    """What a forked child gets when it tries to go on as if it were the client."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        user.release()
        results = [user.client.session() is None, user.probe(keys), user.pin(keys), user.reserve(keys)]
        results.append(user.client.commit(user.grants, [0] * len(user.grants)))
        user.client.give_up(user.grants)
        user.client.close()
        os.write(writer, json.dumps(results).encode())
        os._exit(0)
    os.wait()
    answer = os.read(reader, 4096)
    os.close(reader)
    os.close(writer)
    return list(json.loads(answer))


def leave_a_child() -> int:
    """A forked child that sleeps; its process id."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def main() -> None:
    """Do what the lines on the input say."""
    user = KvdUser(Path(sys.argv[1]), name=f"user-{os.getpid()}")
    print("ready", flush=True)
    for line in sys.stdin:
        action, *numbers = json.loads(line)
        print(json.dumps(act(user, action, numbers)), flush=True)


if __name__ == "__main__":
    main()
