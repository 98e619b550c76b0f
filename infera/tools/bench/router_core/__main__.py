"""`make bench-router-core`: events applied, prompts matched, picks made. The last line is JSON.

QUICK=1 stays under a minute. Times are medians; all samples are kept in `bench/results/router-core.json`.
"""

from __future__ import annotations

import json
import os
import statistics

from infera.tools.bench.results import keep
from infera.tools.bench.router_core.events import apply_rounds, key_rounds, soak
from infera.tools.bench.router_core.picks import Fleet64

QUICK = bool(os.environ.get("QUICK"))
SEED = int(os.environ.get("SEED", "1"))
SOAK_CYCLES = int(os.environ.get("CYCLES", "1000000" if QUICK else "10000000"))
FLAT = 1.02
"""Resident memory at the end against that after a quarter."""


def main() -> None:
    """Run and print."""
    print(f"bench-router-core: seed {SEED}")
    rates, bytes_per_block = apply_rounds(128_000 if QUICK else 512_000, 5 if QUICK else 9, SEED)
    print(
        f"bench-router-core: {statistics.median(rates):,.0f} blocks/s from raw frames, "
        f"{bytes_per_block:.1f} bytes a block"
    )
    stores, removals = key_rounds(500_000, 3 if QUICK else 9, SEED)
    print(
        f"bench-router-core: {statistics.median(stores):,.0f} stores/s, {statistics.median(removals):,.0f} removals/s"
    )
    fleet = Fleet64(SEED)
    match_us = fleet.match_us(2_000 if QUICK else 20_000)
    keys_ms = fleet.keys_ms(20 if QUICK else 100)
    pick_ms = fleet.pick_ms(20 if QUICK else 100)
    wrong = fleet.map.audit()
    samples, soak_wrong = soak(SOAK_CYCLES, SEED)
    quarter, end = samples[len(samples) // 4], samples[-1]
    figures: dict[str, object] = {
        "apply_blocks_per_s": round(statistics.median(rates)),
        "store_keys_per_s": round(statistics.median(stores)),
        "remove_keys_per_s": round(statistics.median(removals)),
        "match_256_us_64w": round(statistics.median(match_us), 2),
        "pick_131k_ms_64w": round(statistics.median(pick_ms), 3),
        "keys_131k_ms": round(statistics.median(keys_ms), 3),
        "bytes_per_block_worker": round(bytes_per_block, 1),
        "rss_flat": end <= quarter * FLAT + 1,
        "rss_quarter_mib": quarter,
        "rss_end_mib": end,
        "soak_cycles": SOAK_CYCLES,
        "audit": wrong or soak_wrong,
    }
    raw = {
        "apply": rates,
        "store": stores,
        "remove": removals,
        "match_us": match_us[:2000],
        "keys_ms": keys_ms,
        "pick_ms": pick_ms,
        "rss_mib": samples,
    }
    keep("router-core", figures, raw)
    print(json.dumps(figures))
    raise SystemExit(figures["audit"] is not None or not figures["rss_flat"])


if __name__ == "__main__":
    main()
