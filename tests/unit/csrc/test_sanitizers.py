"""The C core's self-test under the sanitizers, where a compiler has them. `make sanitize` runs it for longer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = os.environ.get("CC", "gcc")


def has_sanitizer(kind: str, folder: Path) -> bool:
    """Whether a program built with it runs here."""
    if shutil.which(COMPILER) is None:
        return False
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / f"probe-{kind}"
    built = subprocess.run(
        [COMPILER, f"-fsanitize={kind}", "-o", program, source], capture_output=True, check=False
    )  # fmt: skip
    return built.returncode == 0 and subprocess.run([program], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["address", "portable", "thread"])
def test_the_self_test_is_clean(kind: str, tmp_path: Path) -> None:
    if not has_sanitizer("thread" if kind == "thread" else "address", tmp_path):
        pytest.skip(f"{COMPILER} has no {kind} sanitizer here")
    seed = str(random.SystemRandom().randrange(2**32))
    print(f"seed {seed}: repeat with csrc/tests/sanitize.sh build/sanitize 2 {seed} {kind}")
    command = [ROOT / "csrc/tests/sanitize.sh", tmp_path, "2", seed, kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"selftest: seed {seed}" in ended.stdout
    assert "selftest_disk: all right" in ended.stdout
    assert f"selftest_disk_threads: seed {seed}" in ended.stdout
