"""Tests that run with the engine's own Python: they need vLLM and torch. `tests/e2e/test_inside_vllm.py` runs them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
