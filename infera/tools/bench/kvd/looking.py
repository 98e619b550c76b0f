"""Look-ups in an index of its full size, in this process; no data behind it, none is read.

The index is made by the store itself in shared memory, as the daemon's is. One C call for a whole
batch is timed: a Python call around each key would be all that is seen.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from array import array
from collections.abc import Sequence

from infera_core import ffi, lib

from infera.tools.bench.kvd.daemon import BenchDaemon
from infera.tools.bench.kvd.mover import Mover
from kvd.client.lookups import RepeatedLookups

SHARDS = 8
PROMPT_KEYS = 8192
WAITING = 256
WAITING_KEYS = 512
FILL_BATCH = 4096


class FullIndex:
    """An index of `records` slots, filled until the store has to evict, every record with eight shards."""

    def __init__(self, records: int) -> None:
        data_bytes = records * SHARDS * 4096 * 17 // 16  # nothing is evicted for want of data space
        size = int(lib.arena_index_bytes(records, SHARDS, data_bytes))
        self._memory = mmap.mmap(-1, size)
        self._index = ffi.from_buffer(self._memory, require_writable=True)
        self._store = ffi.gc(
            lib.store_create(self._index, bytes(16), 1, records, SHARDS, data_bytes, [random.getrandbits(63)] * 2),
            lib.store_destroy,
        )
        self._ledger = ffi.new("uint8_t[]", int(lib.arena_ledger_bytes(records)))
        self._client = lib.store_client_attach(self._store, self._ledger, 1)
        class_id = ffi.new("uint32_t *")
        lib.store_class_open(self._store, bytes(16), 0, SHARDS, [4096] * SHARDS, b"bench", class_id)
        self.class_id = int(class_id[0])
        self.capacity = int(lib.arena_record_capacity(records))
        for first in range(0, self.capacity, FILL_BATCH):
            self._fill(first)
        status = ffi.new("int *")
        view = lib.arena_view_open(self._index, size, ffi.NULL, data_bytes, ffi.NULL, 0, status)
        self.view = ffi.gc(view, lib.arena_view_close)

    def _fill(self, first: int) -> None:
        wishes = array("Q", [word for n in range(first, first + FILL_BATCH) for word in (n, n * 7, 1)])
        grants = ffi.new("store_grant[]", FILL_BATCH)
        statuses = ffi.new("uint32_t[]", FILL_BATCH)
        terms = ffi.new("store_terms *", (lib.STORE_RETAIN_SHORT, 0, 0))
        for shard in range(SHARDS):
            lib.store_reserve(
                self._store, self._client, self.class_id, shard, terms, ffi.from_buffer("store_wish[]", wishes),
                FILL_BATCH, 1, 2, grants,
            )  # fmt: skip
            reservations = array("Q", bytes(ffi.buffer(grants)))[0::3]
            commitments = array("Q", bytes(16 * FILL_BATCH))
            commitments[0::2] = reservations
            lib.store_commit(
                self._store, self._client, ffi.from_buffer("store_commitment[]", commitments), FILL_BATCH, statuses
            )

    def present_keys(self) -> list[bytes]:
        """All keys that are in it."""
        cursor, events, keys = ffi.new("uint64_t *"), ffi.new("store_event[]", FILL_BATCH), []
        while taken := lib.store_snapshot(self._store, cursor, events, FILL_BATCH):
            raw = bytes(ffi.buffer(events))
            step = ffi.sizeof("store_event")
            keys += [raw[i * step : i * step + 16] for i in range(taken)]
        return keys


def measure_lookups(records: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds for 8,192 random hits, one sample a round, each with other keys; and how full the index was."""
    index = FullIndex(records)
    keys = index.present_keys()
    dice = random.Random(1)
    samples: list[float] = []
    full_mask = (1 << SHARDS) - 1
    for _ in range(rounds):
        asked = b"".join(dice.sample(keys, PROMPT_KEYS))
        started_s = time.perf_counter()
        found = lib.arena_probe_run(index.view, index.class_id, full_mask, asked, PROMPT_KEYS, ffi.NULL)
        samples.append(time.perf_counter() - started_s)
        if found != PROMPT_KEYS:
            raise RuntimeError(f"{PROMPT_KEYS - found} present keys were not found")
    return {"lookup_8192": samples}, len(keys) / index.capacity


def measure_waiting(daemon: BenchDaemon, rounds: int) -> dict[str, list[float]]:
    """Seconds to ask for 256 waiting requests of 512 keys again: nothing changed since, and one record stored since."""
    mover = Mover(daemon.socket, 4096, 64, seed=3)
    lookups = RepeatedLookups(mover.client)
    for first in range(0, WAITING * 8, 64):
        mover.put(first, 64)
    # Eight blocks of each prompt are cached, the rest is not.
    waiting = [mover.keys(i * 8, 8) + os.urandom(16 * (WAITING_KEYS - 8)) for i in range(WAITING)]
    samples: dict[str, list[float]] = {"waiting_unchanged": [], "waiting_changed": []}
    _ask(lookups, mover, waiting)
    for turn in range(rounds):
        started_s = time.perf_counter()
        found = _ask(lookups, mover, waiting)
        samples["waiting_unchanged"].append(time.perf_counter() - started_s)
        mover.put(10**6 + turn, 1)
        time.sleep(0.002)  # the daemon enters it meanwhile
        started_s = time.perf_counter()
        found += _ask(lookups, mover, waiting)
        samples["waiting_changed"].append(time.perf_counter() - started_s)
        if found != 2 * 8 * WAITING:
            raise RuntimeError(f"look-ups found {found} records, not {2 * 8 * WAITING}")
    mover.close()
    return samples


def _ask(lookups: RepeatedLookups, mover: Mover, waiting: Sequence[bytes]) -> int:
    spec, probe_run = mover.spec, lookups.probe_run
    return sum([probe_run(request, spec, keys) for request, keys in enumerate(waiting)])
