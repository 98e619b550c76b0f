"""One process writes the map, others read it, nobody locks: what is there all the time is always found, and what
was never stored or has left is never found."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from infera_core.keys import KEY_BYTES

from infera.cachemap.interface import Tier
from infera.cachemap.native_map import NativeCacheMap

pytestmark = pytest.mark.integration
READERS = 3
SECONDS = 4.0
PROMPT_BLOCKS = 256
HELD_BLOCKS = 100

READER = """
import sys, time
from infera.cachemap.interface import Target, Tier
from infera.cachemap.native_map import MapReader
reader = MapReader.of_descriptor(int(sys.argv[1]))
always, never, gone = (int(word) for word in sys.argv[2:5])
keys = bytes.fromhex(sys.argv[5])
targets = [Target(1, always), Target(1, never), Target(1, gone), Target(2, always), Target(1, None, (never, gone))]
walks, end = 0, time.monotonic() + float(sys.argv[6])
while time.monotonic() < end:
    found = [match.total_tokens for match in reader.match(keys, targets)]
    assert found == [1600, 0, 0, 1600, 0], found
    walks += 1
print(walks)
"""


def test_readers_in_other_processes_see_neither_ghosts_nor_gaps() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    cache_map = NativeCacheMap(200_000)
    keys = dice.randbytes(KEY_BYTES * PROMPT_BLOCKS)
    always, never, gone = (cache_map.add_holder(name) for name in ("always", "never", "gone"))
    cache_map.store(always, Tier.HBM, keys[: KEY_BYTES * HELD_BLOCKS])
    cache_map.store(gone, Tier.HBM, keys)
    cache_map.drop_holder(gone)
    arguments = [str(cache_map.descriptor), str(always), str(never), str(gone), keys.hex(), str(SECONDS)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *arguments],
            pass_fds=[cache_map.descriptor],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(READERS)
    ]
    others = [cache_map.add_holder("") for _ in range(80)]
    end_s = time.monotonic() + SECONDS + 1
    while time.monotonic() < end_s:
        _churn(cache_map, others, keys, dice)
    for reader in readers:
        out, complaint = reader.communicate(timeout=30)
        assert reader.returncode == 0, complaint
        assert int(out) > 0
    assert cache_map.audit() is None


def _churn(cache_map: NativeCacheMap, others: list[int], keys: bytes, dice: random.Random) -> None:
    at, roll = dice.randrange(len(others)), dice.random()
    part = keys[KEY_BYTES * dice.randrange(PROMPT_BLOCKS) :]
    tier = dice.choice(list(Tier))
    if roll < 0.55:
        cache_map.store(others[at], tier, part)
    elif roll < 0.9:
        cache_map.remove(others[at], tier, part)
    elif roll < 0.95:
        cache_map.drop_holder(others[at])
        others[at] = cache_map.add_holder("")
    else:
        cache_map.tick(0)
