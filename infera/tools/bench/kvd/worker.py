"""One of several clients (`worker SOCKET SEED`): moves blocks for as long as a line on its input says."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from infera.tools.bench.kvd.copying import LARGE_BATCH, LARGE_BYTES
from infera.tools.bench.kvd.mover import Mover

BLOCKS = 64


def main() -> None:
    """Read seconds, answer with bytes moved, until the input ends."""
    mover = Mover(Path(sys.argv[1]), LARGE_BYTES, BLOCKS, seed=int(sys.argv[2]))
    number = 0
    for _ in range(8):  # bring the mapping in
        mover.put(number, LARGE_BATCH)
        number += LARGE_BATCH
    print("ready", flush=True)
    for line in sys.stdin:
        end_s = time.perf_counter() + float(line)
        moved = 0
        while time.perf_counter() < end_s:
            moved += mover.put(number, LARGE_BATCH) + mover.get(number - LARGE_BATCH, LARGE_BATCH)
            number += LARGE_BATCH
        print(moved * LARGE_BYTES, flush=True)
    mover.close()


if __name__ == "__main__":
    main()
