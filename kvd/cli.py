"""The command `infera-kvd`."""

from __future__ import annotations

import difflib
import importlib
import sys

from kvd.options import EXIT_USAGE
from kvd.program import PROGRAMS


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: infera-kvd COMMAND [flags]\n")
        for name, program in PROGRAMS.items():
            print(f"  {name:8} {program.summary}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in PROGRAMS:
        near = difflib.get_close_matches(command, PROGRAMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"infera-kvd: unknown command {command!r}{hint}\nTry: infera-kvd --help", file=sys.stderr)
        return EXIT_USAGE
    # Each command imports what it needs: asking a daemon does not load the daemon.
    return int(importlib.import_module(f"kvd.commands.{command}").run(rest))
