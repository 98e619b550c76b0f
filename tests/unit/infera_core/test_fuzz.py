"""The fuzz targets hold for a few seconds; `make fuzz-kvd` runs them for as long as wanted."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 5


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all targets: they share the core's objects."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("target", ["fuzz_adopt", "fuzz_arena", "fuzz_disk", "fuzz_events", "fuzz_frames", "fuzz_map"])
def test_a_short_run_finds_nothing(target: str, build: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    environ = os.environ | {
        "FUZZ_DRIVER": "seeded",
        "FUZZ_SECONDS": str(SECONDS),
        "FUZZ_SEED": str(seed),
        "FUZZ_TARGETS": target,
        "FUZZ_BUILD": str(build),
    }
    run = subprocess.run([ROOT / "csrc/fuzz/run.sh"], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"seed {seed}\n{run.stdout}\n{run.stderr[-4000:]}"
    assert f"seed {seed}" in run.stdout
    assert "none of them fatal" in run.stdout
