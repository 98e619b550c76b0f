"""The command `infera`: finds the subcommand and hands over."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from infera import __version__
from infera.tools.errors import ToolError
from kvd.options import EXIT_USAGE, did_you_mean

# name: module with `main(argv) -> exit status`, what it does
COMMANDS = {
    "up": ("infera.up.up", "serve a model with N engines, the cache daemon and the router on this host"),
    "demo": ("infera.up.demo", "the same with a small real model, showing what the cache saves"),
    "engine-env": ("infera.commands.engine_env", "install an engine in an environment of its own"),
    "overlay": ("infera.commands.overlay", "build the folder that turns an engine into a worker; prints its path"),
    "model": ("infera.commands.model", "prepare a model that needs no model hub; prints its path"),
    "doctor": ("infera.commands.doctor", "say what is there, what is missing and how to cure it"),
}
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        print(f"infera {__version__}")
        return 0
    if words[0] not in COMMANDS:
        nearest = did_you_mean(words[0], list(COMMANDS))
        hint = f"; did you mean {nearest}?" if nearest else ""
        sys.stderr.write(f"infera: unknown command {words[0]!r}{hint}\nTry: infera --help\n")
        return EXIT_USAGE
    run: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[words[0]][0]).main
    try:
        return run(words[1:])
    except ToolError as error:
        sys.stderr.write(f"infera {words[0]}: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def help_text() -> str:
    """The text of `infera --help`."""
    lines = ["usage: infera COMMAND [flags]", "", "Commands:"]
    lines += [f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "infera COMMAND --help shows the flags of a command; infera --version the version."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
