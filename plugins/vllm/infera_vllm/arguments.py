"""vLLM's command line, read just enough to know what the user has said, and added to where he has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infera_vllm.argument_values import dotted_value, merge_nested, parse_json

API_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CLI_MODULE = "vllm.entrypoints.cli.main"


@dataclass
class ServeArguments:
    """The arguments of a serving process: `argv` as in sys.argv, flags from `start` on."""

    argv: list[str]
    start: int
    _file_words: list[str] | None = field(default=None, init=False, repr=False)

    def find(self, flag: str) -> str | None:
        """The last value given for a flag; "" for a flag without one; None when it is absent.

        vLLM takes `--a-b`, `--a_b`, `--a=v`, and `--a.key v` for JSON flags; all count, and so does the file named by
        `--config`, whose flags come before those of the command line.
        """
        given = [value for _, _, value, _ in self._given(flag)]
        return given[-1] if given else None

    def find_json(self, flag: str) -> dict[str, Any] | None:
        """The object that vLLM makes of a JSON flag; None when it is absent.

        Keys given one by one (`--flag.key v`) make an object of their own, which replaces one given whole.

        Raises:
            ValueError: for what is no JSON object.
        """
        keys: dict[str, Any] = {}
        whole: str | None = None
        for _, key, value, _ in self._given(flag):
            if key:
                merge_nested(keys, dotted_value(key, value))
            else:
                whole = value
        if keys or whole is None:
            return keys or None
        found = parse_json(whole)
        if not isinstance(found, dict):
            raise ValueError(f"{flag} is no JSON object")
        return found

    def is_set(self, name: str) -> bool:
        """Whether a switch is on: the last of `--name` and `--no-name` counts."""
        return self._last_switch(name) == f"--{name}"

    def is_mentioned(self, name: str) -> bool:
        """Whether the user has said anything about a switch."""
        return self._last_switch(name) is not None

    def _last_switch(self, name: str) -> str | None:
        on, off = (list(self._given(flag)) for flag in (f"--{name}", f"--no-{name}"))
        if not on and not off:
            return None
        return f"--{name}" if on and (not off or on[-1][0] > off[-1][0]) else f"--no-{name}"

    def is_in_file(self, flag: str) -> bool:
        """Whether the file of `--config` gives this flag, from where it cannot be taken away."""
        return any(position < 0 for position, *_ in self._given(flag))

    def keys_in_file(self, flag: str) -> list[str]:
        """Keys that the file of `--config` gives one by one: vLLM puts them after all else, so they always win."""
        return [key for position, key, *_ in self._given(flag) if position < 0 and key]

    def remove(self, flag: str) -> None:
        """Take a flag off the command line, however often it is given."""
        for position, _, _, words in reversed(list(self._given(flag))):
            if position >= 0:
                del self.argv[position : position + words]

    def replace(self, flag: str, value: str) -> None:
        """Give a flag this value and no other. One in the file of `--config` comes before it, and so loses."""
        self.remove(flag)
        self.add(flag, value)

    def add(self, flag: str, value: str | None = None) -> None:
        """Append a flag."""
        self.argv += [flag] if value is None else [flag, value]

    def _given(self, flag: str) -> Iterator[tuple[int, str, str, int]]:
        """Each place where a flag is given: position in argv, key after the dot, value, words it takes.

        Positions below 0 are in the file of `--config`.
        """
        from_file = self._words_of_config_file()
        yield from _find_flag(from_file, 0, flag, -len(from_file))
        yield from _find_flag(self.argv, self.start, flag, 0)

    def _words_of_config_file(self) -> list[str]:
        """The file given by --config as the words that vLLM makes of it."""
        if self._file_words is None:
            words = self.argv[self.start :]
            path = words[words.index("--config") + 1] if "--config" in words[:-1] else None
            self._file_words = _read_config_file(Path(path)) if path else []
        return self._file_words


def _find_flag(words: list[str], start: int, flag: str, offset: int) -> Iterator[tuple[int, str, str, int]]:
    for position in range(start, len(words)):
        name, equals, inline = words[position].partition("=")
        stem, _, key = name.partition(".")
        if not name.startswith("--") or stem.replace("_", "-") != flag:
            continue
        following = words[position + 1] if position + 1 < len(words) else "--"
        if equals:
            yield position + offset, key, inline, 1
        elif following.startswith("--"):
            yield position + offset, key, "", 1
        else:
            yield position + offset, key, following, 2


def _read_config_file(path: Path) -> list[str]:
    """Empty for a file that cannot be read: vLLM will say so itself."""
    import yaml  # type: ignore[import-untyped]  # vLLM's environment has it

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return []
    words: list[str] = []
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


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
