"""Where raw results of measurements are kept."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from infera.tools.sources import checkout_folder


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def keep(name: str, figures: Mapping[str, object], raw: Mapping[str, object]) -> Path:
    """Write one run's figures and raw samples to `bench/results/NAME.json`; the last run is kept."""
    folder = (checkout_folder() or Path.cwd()) / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"figures": figures, "machine": machine(), "unix_s": int(time.time()), "raw": raw}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
