"""`make bench-kvd`: all of it, as a table and one JSON object. QUICK=1 for under a minute."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass

from infera.tools.bench.kvd.bare import Bare
from infera.tools.bench.kvd.control import measure_control
from infera.tools.bench.kvd.copying import (
    ARENA_BYTES,
    LARGE_BATCH,
    LARGE_BYTES,
    SMALL_BYTES,
    SMALL_PUTS,
    Samples,
    measure_large,
    measure_small,
)
from infera.tools.bench.kvd.crowd import measure_crowd
from infera.tools.bench.kvd.daemon import BenchDaemon
from infera.tools.bench.kvd.looking import PROMPT_KEYS, measure_lookups, measure_waiting
from infera.tools.bench.kvd.restarting import measure_restart
from infera.tools.bench.results import keep

QUICK = bool(os.environ.get("QUICK"))


@dataclass(frozen=True)
class Target:
    """A figure, what is wanted of it, and whether more is better."""

    name: str
    wanted: float | None
    is_more_better: bool
    what: str


TARGETS = (
    Target("memcpy_gbps", None, True, "plain copies of 16 blocks of 1 MiB, the faster direction"),
    Target("put_ratio", 0.9, True, "of memcpy: 1 MiB, batch 16, checksum on, arena full"),
    Target("get_ratio", 0.9, True, "of memcpy: 1 MiB, batch 16, verified"),
    Target("put_64k_b1_ratio", 0.5, True, "of memcpy: single 64 KiB, checksum on"),
    Target("lookup_keys_per_s", 10e6, True, "random hits of a full index, 8 shards; one C call a batch"),
    Target("lookup_8192_ms", 0.8, False, "the same for a prompt of 131k tokens"),
    Target("lookup_256_waiting_ms", 0.2, False, "256 requests asked again, nothing changed; Python included"),
    Target("rpc_over_pingpong", 2.0, False, "RESERVE and COMMIT of 64 over a bare ping-pong"),
    Target("clients8_ratio", 0.9, True, "8 clients' total over one client's"),
    Target("restart_1m_records_s", 1.0, False, "SIGKILL, start, first answer; null when records are lost"),
    Target("daemon_cpu_s_per_gb", 0.05, False, "processor time of the daemon while moving 1 MiB blocks"),
)


def main() -> None:
    """Measure, print, keep."""
    bare = Bare()
    flags = ("--memory", str(ARENA_BYTES))
    figures: dict[str, object] = {}
    raw: dict[str, object] = {"quick": QUICK}
    with BenchDaemon(*flags) as daemon:
        say("copies of 1 MiB")
        large = measure_large(daemon, bare, 60 if QUICK else 300)
        figures |= large_figures(large)
    with BenchDaemon(*flags) as daemon:
        say("single puts of 64 KiB")
        small = measure_small(daemon, bare, 60 if QUICK else 300)
        figures["put_64k_b1_ratio"] = small.median_s("memcpy_64k") / small.median_s("put_64k")
        say("look-ups")
        waiting = measure_waiting(daemon, 50 if QUICK else 300)
        say("control round trips")
        control = measure_control(daemon, bare, 300 if QUICK else 2000)
    lookups, share_full = measure_lookups(1 << (18 if QUICK else 20), 60 if QUICK else 300)
    lookup_s = statistics.median(lookups["lookup_8192"])
    figures["lookup_keys_per_s"] = PROMPT_KEYS / lookup_s
    figures["lookup_8192_ms"] = lookup_s * 1000
    figures["lookup_256_waiting_ms"] = statistics.median(waiting["waiting_unchanged"]) * 1000
    figures["rpc_over_pingpong"] = statistics.median(control["rpc"]) / statistics.median(control["pingpong"])
    with BenchDaemon(*flags) as daemon:
        say("eight clients")
        crowd = measure_crowd(daemon.socket, 2 if QUICK else 8, 1.5)
    figures["clients8_ratio"] = statistics.median(crowd["eight"]) / statistics.median(crowd["one"])
    say("restart with a million records")
    restarts, lost = measure_restart(1 if QUICK else 5)
    figures["restart_1m_records_s"] = None if lost else statistics.median(restarts)
    raw |= {"large_s": large.seconds, "small_s": small.seconds, "waiting_s": waiting, "control_s": control}
    raw |= {"lookups_s": lookups, "crowd_bytes_per_s": crowd, "restart_s": restarts}
    raw |= {"index_share_full": share_full, "records_lost": lost, "failed_moves": large.failed + small.failed}
    ordered = {target.name: rounded(figures[target.name]) for target in TARGETS}
    keep("kvd", ordered, raw)
    print_table(ordered)
    print_notes(waiting, control, share_full, lost, large, small)
    print(json.dumps(ordered))


def large_figures(large: Samples) -> dict[str, object]:
    """Ratios against the faster direction of memcpy."""
    memcpy_s = min(large.median_s("memcpy_in"), large.median_s("memcpy_out"))
    return {
        "memcpy_gbps": LARGE_BATCH * LARGE_BYTES / memcpy_s / 1e9,
        "put_ratio": memcpy_s / large.median_s("put"),
        "get_ratio": memcpy_s / large.median_s("get"),
        "daemon_cpu_s_per_gb": large.daemon_cpu_s / (large.moved_bytes / 1e9),
    }


def rounded(value: object) -> float | None:
    """Four digits that count."""
    return float(f"{value:.4g}") if isinstance(value, float) else None


def say(what: str) -> None:
    """Progress, apart from the results."""
    print(f"bench-kvd: {what}", file=sys.stderr, flush=True)


def print_table(figures: dict[str, float | None]) -> None:
    """Figures beside what is wanted."""
    print(f"{'figure':22} {'measured':>12} {'target':>12}      what")
    for target in TARGETS:
        value = figures[target.name]
        measured = "null" if value is None else f"{value:,.4g}" if value < 1e5 else f"{value:,.0f}"
        wanted, verdict = "", ""
        if target.wanted is not None:
            wanted = f"{'>=' if target.is_more_better else '<='} {target.wanted:,.12g}"
            met = value is not None and (value >= target.wanted) == target.is_more_better
            verdict = "ok" if met or value == target.wanted else "MISS"
        print(f"{target.name:22} {measured:>12} {wanted:>12} {verdict:4} {target.what}")


def print_notes(
    waiting: dict[str, list[float]], control: dict[str, list[float]], share_full: float, lost: int, large: Samples,
    small: Samples,
) -> None:  # fmt: skip
    """What the figures leave out."""
    changed_ms = statistics.median(waiting["waiting_changed"]) * 1000
    put_us = small.median_s("put_64k") / SMALL_PUTS * 1e6
    small_gbps = SMALL_BYTES * SMALL_PUTS / small.median_s("memcpy_64k") / 1e9
    print(f"256 waiting requests after a record was stored: {changed_ms:.3f} ms")
    print(f"one 64 KiB put: {put_us:.1f} us; memcpy of 64 KiB blocks: {small_gbps:.1f} GB/s")
    print(f"bare round trip: {statistics.median(control['pingpong']) / 2 * 1e6:.1f} us; index {share_full:.0%} full")
    print(f"blocks refused or wrong: {large.failed} large, {small.failed} small; records lost in restarts: {lost}")


if __name__ == "__main__":
    main()
