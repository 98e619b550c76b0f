"""`make soak-kvd`: ten million saves of keys never seen before; memory must stay flat and the books exact.

Drives the store itself, in one process without the daemon, because what could grow is there: books,
ghosts of the eviction queues, events, tenants.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import time
from pathlib import Path

from infera.tools.bench.results import keep
from kvd.protocol import COMMITMENT, GRANT, WISH
from kvd.retention import RETENTIONS
from kvd.store import Store, index_bytes, ledger_bytes

CYCLES = int(os.environ.get("CYCLES", "10000000"))
BATCH = 1024
DATA_BYTES = 256 << 20
RECORDS = 65536
RECORD_BYTES = 4096
SAMPLES = 20


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Run and print."""
    seed = int(os.environ.get("SEED", "1"))
    dice = random.Random(seed)
    print(f"soak-kvd: {CYCLES} saves, seed {seed}")
    index = mmap.mmap(-1, index_bytes(RECORDS, 1, DATA_BYTES))
    ledger = mmap.mmap(-1, ledger_bytes(RECORDS))
    store = Store(
        index, instance=bytes(16), generation=1, records=RECORDS, shards_max=1, data_bytes=DATA_BYTES,
        seed=(dice.getrandbits(64), dice.getrandbits(64)),
    )  # fmt: skip
    client = store.attach(ledger, token=1)
    class_id = store.open_class(b"n" * 16, 0, [RECORD_BYTES], "soak")
    samples: list[float] = []
    started_s = time.monotonic()
    for number in range(0, CYCLES, BATCH):
        _save_batch(store, client, class_id, dice, number)
        if number // BATCH % max(1, CYCLES // BATCH // SAMPLES) == 0:
            samples.append(round(resident_mib(), 2))
            print(f"soak-kvd: {number} saves, {samples[-1]} MiB resident, {time.monotonic() - started_s:.0f} s")
    wrong = store.audit()
    warm = samples[len(samples) // 4]
    figures: dict[str, object] = {
        "cycles": CYCLES,
        "rss_quarter_mib": warm,
        "rss_end_mib": samples[-1],
        "evicted": store.stats()["evicted_total"],
        "audit": wrong,
    }
    keep("kvd-soak", figures, {"rss_mib": samples})
    print(json.dumps(figures))
    raise SystemExit(wrong is not None or samples[-1] > warm * 1.02 + 1)


def _save_batch(store: Store, client: int, class_id: int, dice: random.Random, number: int) -> None:
    """Reserve and commit a batch of fresh keys under changing tenants, and take the events."""
    wishes = b"".join(WISH.pack((number + i).to_bytes(16, "little"), i % 64 + 1, 0) for i in range(BATCH))
    now_ns = number * 1000
    grants = store.reserve(
        client, class_id, 0, RETENTIONS["short"], dice.getrandbits(20), wishes, now_ns, now_ns + 10**12
    )
    commitments = b"".join(COMMITMENT.pack(name, 0) for name, _, status, _ in GRANT.iter_unpack(grants) if status == 0)
    store.commit(client, commitments)
    store.take_events()


if __name__ == "__main__":
    main()
