"""What the engine computes on, as one word or two: workers alike in it are expected to be alike in speed."""

from __future__ import annotations

import re
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/drm")
_CPU = Path("/proc/cpuinfo")


def hardware_name(nvidia: Path = _NVIDIA, amd: Path = _AMD, cpu: Path = _CPU) -> str | None:
    """The first GPU's product name, else the processor's; None when the system names neither."""
    candidates = (
        *(_field(path, r"^Model:\s*(.+)$") for path in sorted(nvidia.glob("*/information"))),
        *(_field(path, r"^(.+)$") for path in sorted(amd.glob("card*/device/product_name"))),
        _field(cpu, r"^model name\s*:\s*(.+)$"),
    )
    return next((name for name in candidates if name), None)


def _field(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(errors="replace"), re.M)
    except OSError:
        return None
    return " ".join(found.group(1).split())[:128] or None if found else None
