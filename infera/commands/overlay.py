"""`infera overlay`: the folder that an engine needs first on its PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infera.tools.engine_env import ensure_vllm
from infera.tools.engine_python import inspect_engine_python
from infera.tools.overlay import ensure_overlay
from kvd.options import Option, Program

PROGRAM = Program(
    name="infera overlay",
    summary="Builds the overlay for an engine's Python when needed, and prints its folder.",
    options=(
        Option(
            "--engine-python",
            "Python of an environment that has the engine; without it, the one that `infera engine-env` makes.",
            parse=Path,
            metavar="PATH",
        ),
        Option("--engine", "Which engine it is for.", choices=("vllm",), default="vllm"),
    ),
    epilog="Use it by hand: PYTHONPATH=$(infera overlay) INFERA_DISCOVERY=http://127.0.0.1:8000 vllm serve MODEL",
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises ToolError."""
    values = PROGRAM.parse(argv, os.environ)
    chosen: Path | None = values.engine_python
    print(ensure_overlay(inspect_engine_python(chosen, values.engine) if chosen else ensure_vllm()))
    return 0
