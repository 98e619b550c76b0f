"""`make bench-hook`: what the overlay's sitecustomize costs a Python process that did not ask for it.

Starts Python many times, in turn without and with the hook folder on PYTHONPATH, no INFERA_ variable
set, and compares the medians. A third kind has a variable set but imports no engine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import infera.hooks
from infera.tools.bench.results import keep

ROUNDS = 40 if os.environ.get("QUICK") else 200


def start_ms(environ: dict[str, str]) -> float:
    """Milliseconds from start to end of a Python process that does nothing."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return (time.perf_counter() - started_s) * 1000


def main() -> None:
    """Measure and print."""
    site = Path(infera.hooks.__file__).with_name("site")
    root = Path(infera.hooks.__file__).parents[2]
    base = {name: value for name, value in os.environ.items() if not name.startswith(("INFERA_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as empty:
        kinds = {
            "without": base | {"PYTHONPATH": f"{empty}{os.pathsep}{root}"},
            "idle": base | {"PYTHONPATH": f"{site}{os.pathsep}{root}"},
            "armed": base | {"PYTHONPATH": f"{site}{os.pathsep}{root}", "INFERA_KVD_SOCKET": "/nowhere"},
        }
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, environ in kinds.items():
                samples[name].append(start_ms(environ))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{'kind':8} {'median ms':>10}")
    for name, value in medians.items():
        print(f"{name:8} {value:10.2f}")
    figures: dict[str, object] = {
        "python_start_ms": round(medians["without"], 3),
        "hook_idle_added_ms": round(medians["idle"] - medians["without"], 3),
        "hook_armed_added_ms": round(medians["armed"] - medians["without"], 3),
    }
    keep("hook", figures, {"samples_ms": samples})
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
