"""Writes the configuration reference of the manual from the option tables: `python -m infera.tools.reference`.

With `--check` it writes nothing and fails when the page is out of date.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from infera.tools.sources import checkout_folder
from kvd.options import Program

PAGE = Path("docs") / "configuration.md"

# Where the tables are. A module that does not exist yet is left out.
TABLES = (
    "infera.up.up",
    "infera.up.demo",
    "infera.server.options",
    "infera.engine.vllm",
    "kvd.program",
    "infera.commands.engine_env",
    "infera.commands.overlay",
    "infera.commands.model",
    "infera.commands.doctor",
)

HEAD = """\
# Configuration

Every program takes its options from a table in its source; this page is made from the same tables by
`python -m infera.tools.reference`, so do not edit it. A flag beats the environment variable, which beats the default.
Sizes are written like `16G`, `512M`, `4096` (powers of 1024), durations like `30s`, `5m`, `250ms`.
"""


def main(argv: Sequence[str]) -> int:
    """Writes or checks the page; the status is 1 when a check fails."""
    root = checkout_folder()
    if root is None:
        sys.stderr.write("the reference is written from a checkout of Infera only\n")
        return 1
    text = reference_page()
    if "--check" not in argv:
        (root / PAGE).write_text(text)
        return 0
    if (root / PAGE).read_text() == text:
        return 0
    sys.stderr.write(f"{PAGE} is out of date; run: python -m infera.tools.reference\n")
    return 1


def reference_page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(program.reference_markdown() for program in programs())])


def programs() -> list[Program]:
    """The programs declared at the top of the modules in TABLES, each once, in order."""
    found: dict[str, Program] = {}
    for name in TABLES:
        if not _exists(name):
            continue
        for value in vars(importlib.import_module(name)).values():
            for program in value if isinstance(value, tuple | list) else [value]:
                if isinstance(program, Program):
                    found.setdefault(program.name, program)
    return list(found.values())


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
