"""vLLM's command line, read just enough to know what the user has said, and added to where he has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CLI_MODULE = "vllm.entrypoints.cli.main"


@dataclass
class ServeArguments:
    """The arguments of a serving process: `argv` as in sys.argv, flags from `start` on."""

    argv: list[str]
    start: int

    def find(self, flag: str, *, dotted: bool = True) -> str | None:
        """The last value given for a flag; "" for a flag without one; None when it is absent.

        vLLM takes `--a-b`, `--a_b`, `--a=v`, and `--a.key v` for JSON flags; all count, the last form where `dotted`.
        """
        given = [value for _, key, value, _ in self._given(flag) if dotted or not key]
        return given[-1] if given else self._find_in_config_file(flag)

    def find_keys(self, flag: str) -> dict[str, Any]:
        """What is given as `--flag.key value`; values are JSON where they can be read as that, as vLLM reads them."""
        return {key: _json_or_text(value) for _, key, value, _ in self._given(flag) if key}

    def replace(self, flag: str, value: str) -> None:
        """Give a flag this value and no other."""
        for position, _, _, words in reversed(list(self._given(flag))):
            del self.argv[position : position + words]
        self.add(flag, value)

    def _given(self, flag: str) -> Iterator[tuple[int, str, str, int]]:
        """Each place where a flag is given: position in argv, key after the dot, value, words it takes."""
        for position in range(self.start, len(self.argv)):
            name, equals, inline = self.argv[position].partition("=")
            stem, _, key = name.partition(".")
            if not name.startswith("--") or stem.replace("_", "-") != flag:
                continue
            following = self.argv[position + 1] if position + 1 < len(self.argv) else "--"
            if equals:
                yield position, key, inline, 1
            elif following.startswith("--"):
                yield position, key, "", 1
            else:
                yield position, key, following, 2

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


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


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
