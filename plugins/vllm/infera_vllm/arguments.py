"""vLLM's command line, read just enough to know what the user has said, and added to where he has not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

API_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CLI_MODULE = "vllm.entrypoints.cli.main"


@dataclass
class ServeArguments:
    """The arguments of a serving process: `argv` as in sys.argv, flags from `start` on."""

    argv: list[str]
    start: int

    def find(self, flag: str) -> str | None:
        """The last value given for a flag; "" for a flag without one; None when it is absent.

        vLLM takes `--a-b`, `--a_b`, `--a=v`, and `--a.key v` for JSON flags; all count.
        """
        value: str | None = None
        arguments = self.argv[self.start :]
        for position, argument in enumerate(arguments):
            name, equals, inline = argument.partition("=")
            if not name.startswith("--"):
                continue
            if name.partition(".")[0].replace("_", "-") != flag:
                continue
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            value = inline if equals else ("" if following.startswith("--") else following)
        return value if value is not None else self._find_in_config_file(flag)

    def _find_in_config_file(self, flag: str) -> str | None:
        """A flag set in the file given by --config, which vLLM merges before its own parsing."""
        if flag == "--config" or (path := self.find("--config")) is None:
            return None
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return None  # vLLM will say so itself
        for line in lines:
            name, colon, value = line.partition(":")
            if colon and "--" + name.strip().replace("_", "-") == flag:
                return value.strip().strip("'\"")
        return None

    def add(self, flag: str, value: str | None = None) -> None:
        """Append a flag."""
        self.argv += [flag] if value is None else [flag, value]


def find_serve_arguments(argv: list[str], original_argv: list[str]) -> ServeArguments | None:
    """The arguments when this process is about to serve, else None.

    Known ways: `vllm serve ...`, `python -m vllm.entrypoints.cli.main serve ...` and
    `python -m vllm.entrypoints.openai.api_server ...`. `original_argv` is `sys.orig_argv`, which
    still names a module while `argv[0]` is "-m".
    """
    modules = {original_argv[i + 1] for i, word in enumerate(original_argv[:-1]) if word == "-m"}
    program = Path(argv[0]).name if argv else ""
    if API_SERVER_MODULE in modules:
        return ServeArguments(list(argv), 1)
    if program == "vllm" or CLI_MODULE in modules:
        return ServeArguments(list(argv), 2) if argv[1:2] == ["serve"] else None
    return None
