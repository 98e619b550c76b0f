"""`infera engine-env`: environments of engines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infera.tools.engine_env import ensure_vllm
from kvd.options import Positional, Program

PROGRAM = Program(
    name="infera engine-env",
    summary="Installs an engine for the CPU in a virtual environment below the cache folder; prints its python.",
    positionals=(
        Positional("ACTION", "What to do: install.", choices=("install",)),
        Positional("ENGINE", "Which engine: vllm.", choices=("vllm",), is_required=False, default="vllm"),
    ),
    epilog="Engines with a GPU bring their own environment: infera up MODEL --engine-python PATH",
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises ToolError."""
    PROGRAM.parse(argv, os.environ)
    print(ensure_vllm().python)
    return 0
