"""Runs `tests/inside_vllm` with the engine's Python, where vLLM and torch are."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from infera.tools.engine_env import ensure_vllm
from infera.tools.overlay import ensure_overlay

ROOT = Path(__file__).parents[2]
# Our own environment comes last on the path: it lends pytest, and shadows nothing of the engine's.
RUN = "import sys; sys.path.append(sys.argv[1]); import pytest; raise SystemExit(pytest.main(sys.argv[2:]))"
PYTEST_ARGUMENTS = ["-q", "-p", "no:cacheprovider", "-p", "no:anyio", "--noconftest", "-c", "/dev/null"]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_connector_with_the_engines_python() -> None:
    python = ensure_vllm()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("INFERA_")}
    environ |= {"PYTHONPATH": f"{ensure_overlay(python)}{os.pathsep}{ROOT}", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(python.python), "-c", RUN, sysconfig.get_paths()["purelib"], *PYTEST_ARGUMENTS]
    command += [f"--rootdir={ROOT}", "--import-mode=importlib", str(ROOT / "tests" / "inside_vllm")]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    print(done.stdout.splitlines()[-1])
