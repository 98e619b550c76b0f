"""The short part of `make e2e-vllm` in every test run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_hybrid_model_answers_with_the_cache_as_without() -> None:
    command = [sys.executable, "-m", "tests.e2e.vllm_cases", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["wrong"] == 0
    assert summary["identical"] == summary["cases"] > 15
