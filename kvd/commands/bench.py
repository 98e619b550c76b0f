"""`infera-kvd bench`: measure a folder the way the daemon would use it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvd.disk_bench import BenchError, BenchStore
from kvd.disk_store import DiskSettings
from kvd.options import Values
from kvd.program import BENCH
from kvd.storage_look import look

SIZES_BYTES = (1 << 20, 64 << 10)
PASS_LIMIT_S = 30.0
ROOM_FACTOR = 1.5
"""Segments beside those measured: one is being made ready, and the last is never quite full."""


def run(arguments: list[str]) -> int:
    """Write, read and say how fast; returns the exit status."""
    values = BENCH.parse(arguments, os.environ)
    try:
        result = measure(Path(values.path).absolute(), values)
    except (BenchError, OSError) as error:
        print(f"infera-kvd bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if values.json else as_text(result))
    return 0


def measure(path: Path, values: Values) -> dict[str, Any]:
    """Figures of all sizes.

    Raises:
        BenchError: when the folder cannot be measured.
    """
    storage = look(path)
    result: dict[str, Any] = {
        "path": str(path),
        "storage": storage.describe(),
        "kind": storage.kind,
        "warnings": list(storage.warnings),
        "depth": values.depth,
        "sizes": {},
    }
    for object_bytes in SIZES_BYTES:
        size_bytes = values.size if object_bytes >= 1 << 20 else values.size // 4
        settings = DiskSettings(
            size_bytes=int(size_bytes * ROOM_FACTOR) + (256 << 20), segment_bytes=32 << 20, depth=values.depth
        )
        store = BenchStore(path, size_bytes, object_bytes, values.depth, settings)
        try:
            written = store.write(PASS_LIMIT_S)
            read = store.read(PASS_LIMIT_S, written.operations)
            result["way"] = store.store.devices()[0].way
        finally:
            store.close()
        result["sizes"][str(object_bytes)] = {"write": written.summary(), "read": read.summary()}
    return result


def as_text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [result["storage"], f"used through {result['way']}, {result['depth']} transfers at once"]
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    lines.append(f"{'size':>8} {'':5} {'GB/s':>8} {'per s':>9} {'median ms':>10} {'99% ms':>8} {'wrong':>6}")
    for size, passes in result["sizes"].items():
        for name, figures in passes.items():
            lines.append(
                f"{int(size) >> 10:>6} K {name:5} {figures['gb_per_s']:>8.3f} {figures['operations_per_s']:>9.0f} "
                f"{figures['latency_ms_median']:>10.2f} {figures['latency_ms_99']:>8.2f} {figures['wrong']:>6.0f}"
            )
    return "\n".join(lines)
