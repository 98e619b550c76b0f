"""Writes the configuration reference of the manual from the option tables: `python -m infera.tools.reference`.

Other pages may hold parts of it, between `<!-- flags: PROGRAM, SECTION -->` and `<!-- end of flags -->`.
With `--check` it writes nothing and fails when the page is out of date.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from infera.tools.sources import checkout_folder
from kvd.options import Program

PAGE = Path("docs") / "configuration.md"

PAGES_WITH_PARTS = (Path("docs") / "router.md", Path("docs") / "engines.md")

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
    "infera.commands.doctor_vllm",
    "infera.commands.doctor_prompts",
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
    late = [path for path, text in pages(root).items() if (root / path).read_text() != text]
    if "--check" not in argv:
        for path, text in pages(root).items():
            (root / path).write_text(text)
        return 0
    for path in late:
        sys.stderr.write(f"{path} is out of date; run: python -m infera.tools.reference\n")
    return 1 if late else 0


def pages(root: Path) -> dict[Path, str]:
    """Every page that is made from the tables, wholly or in part, as it should be."""
    return {PAGE: reference_page()} | {path: with_parts((root / path).read_text()) for path in PAGES_WITH_PARTS}


def with_parts(page: str) -> str:
    """The page with the flags of every marked section filled in. Raises KeyError for a section that is not there."""
    known = {program.name: program.reference_markdown() for program in programs()}

    def fill(found: re.Match[str]) -> str:
        sections = dict(re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", known[found["program"]], re.M))
        return f"{found['begin']}\n{sections[found['section']]}{found['end']}"

    return _PART.sub(fill, page)


_PART = re.compile(
    r"(?P<begin><!-- flags: (?P<program>[^,]+), (?P<section>.+) -->)\n(?:.*\n)*?(?P<end><!-- end of flags -->)"
)


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
