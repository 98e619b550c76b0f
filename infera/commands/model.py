"""`infera model`: models that need no model hub."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infera.tools.models import MODEL_NAMES, prepare_smollm2, prepare_tiny
from kvd.options import Positional, Program

PROGRAM = Program(
    name="infera model",
    summary="Prepares a model below the cache folder when it is not there, and prints its folder.",
    positionals=(
        Positional("ACTION", "What to do: prepare.", choices=("prepare",)),
        Positional("NAME", "smollm2: SmolLM2-135M-Instruct; tiny: a random model for tests.", choices=MODEL_NAMES),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises ToolError."""
    values = PROGRAM.parse(argv, os.environ)
    print(prepare_smollm2() if values.name == "smollm2" else prepare_tiny())
    return 0
