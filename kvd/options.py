"""Command line options declared once, as a table.

A `Program` holds a table of `Option`s. The same table parses flags and environment variables, prints
`--help`, and writes the reference page of the manual, so the three cannot disagree.

    SERVE = Program(
        name="infera-kvd serve",
        summary="Runs the cache daemon of this host.",
        options=(
            Option("--socket", "Unix socket to listen on.", env="INFERA_KVD_SOCKET", default="/run/kvd.sock"),
            Option("--memory", "Size of the arena.", parse=parse_size_bytes, default="2G", metavar="SIZE"),
        ),
    )
    values = SERVE.parse(sys.argv[1:], os.environ)
    values.memory     # 2147483648
    values.source("memory")  # "default", "environment INFERA_..." or "flag"

A flag beats the environment variable, which beats the default. Flags are never abbreviated: `--sock` is an
error that suggests `--socket`. The module depends on the standard library only, because engines import it.
"""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

EXIT_USAGE = 2
HELP_WIDTH_COLUMNS = 100
HELP_INDENT_COLUMNS = 30

_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DURATION_UNITS_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off"})


class OptionError(ValueError):
    """What the user gave cannot be used; the text says what to write instead."""


def parse_size_bytes(text: str) -> int:
    """Bytes of `16G`, `512M`, `64K`, `1.5GiB` or `4096`; units are powers of 1024.

    Raises OptionError when the text is not a size, or not a whole number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise OptionError(f"{text!r} is not a size; write it like 16G, 512M, 64K or 4096 (bytes)")
    size_bytes = float(match[1]) * _SIZE_UNITS[match[2].upper()]
    if "." not in match[1]:
        return int(match[1]) * _SIZE_UNITS[match[2].upper()]
    if not size_bytes.is_integer():
        raise OptionError(f"{text!r} is not a whole number of bytes; write it with a smaller unit")
    return int(size_bytes)


def parse_duration_s(text: str) -> float:
    """Seconds of `250ms`, `30s`, `5m`, `2h`, `1d` or `30` (seconds).

    Raises OptionError when the text is not a duration.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", text, re.IGNORECASE)
    if match is None:
        raise OptionError(f"{text!r} is not a duration; write it like 30s, 5m, 2h, 250ms or 30 (seconds)")
    return float(match[1]) * _DURATION_UNITS_S[match[2].lower()]


def parse_port(text: str) -> int:
    """A TCP port, 1 to 65535. Raises OptionError otherwise."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise OptionError(f"{text!r} is not a port; write a number from 1 to 65535")
    return int(text)


def parse_count(text: str) -> int:
    """A whole number of at least 1. Raises OptionError otherwise."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise OptionError(f"{text!r} is not a count; write a whole number of at least 1")
    return int(text)


def parse_switch(text: str) -> bool:
    """True or False of the words an environment variable may hold. Raises OptionError otherwise."""
    word = text.strip().lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise OptionError(f"{text!r} is neither on nor off; write 1 or 0")


@dataclass(frozen=True)
class Option:
    """One option of a program.

    `default` is a value, or a text written as a user would write it, which then goes through `parse`; None means unset.
    `is_switch` takes no value; with a default of True, `--no-x` turns it off.
    `repeatable` gives a tuple; its environment variable holds a comma-separated list.
    """

    flag: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    env: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    repeatable: bool = False
    section: str = "General"
    is_required: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*", self.flag):
            raise ValueError(f"option {self.flag!r} must look like --some-name")
        if self.is_switch and (self.repeatable or self.choices or self.is_required):
            raise ValueError(f"switch {self.flag} takes no value, so nothing about a value can be said")

    @property
    def name(self) -> str:
        """The attribute under which the value is found: `--kvd-memory` is `kvd_memory`."""
        return self.flag[2:].replace("-", "_")

    @property
    def usage(self) -> str:
        """The flag with its value as shown to the user, e.g. `--memory SIZE`."""
        if self.is_switch:
            return f"--[no-]{self.flag[2:]}" if self.default is True else self.flag
        return f"{self.flag} {self.metavar or self.name.upper()}"

    def value_of(self, text: str, origin: str) -> Any:
        """One parsed value. Raises OptionError naming `origin`, the flag or variable the text came from."""
        if self.choices and text not in self.choices:
            raise OptionError(
                f"{origin}: {text!r} is not one of {', '.join(self.choices)}{_nearest(text, self.choices)}"
            )
        try:
            return self.parse(text)
        except ValueError as error:
            raise OptionError(f"{origin}: {error}") from error

    def default_value(self) -> Any:
        """The value used when neither a flag nor the environment gives one."""
        if self.is_switch:
            return bool(self.default)
        if self.repeatable:
            return tuple(self.default or ())
        if isinstance(self.default, str) and self.parse is not str:
            return self.value_of(self.default, f"default of {self.flag}")
        return self.default

    def environment_value(self, text: str) -> Any:
        """The value an environment variable with this text gives. Raises OptionError."""
        origin = f"environment variable {self.env}"
        if self.is_switch:
            try:
                return parse_switch(text)
            except OptionError as error:
                raise OptionError(f"{origin}: {error}") from error
        if self.repeatable:
            return tuple(self.value_of(part.strip(), origin) for part in text.split(",") if part.strip())
        return self.value_of(text, origin)

    def default_text(self) -> str:
        """The default as the reference shows it; empty when there is none."""
        if self.is_switch:
            return "on" if self.default else "off"
        if self.default is None or self.default == ():
            return ""
        return ",".join(map(str, self.default)) if self.repeatable else str(self.default)


@dataclass(frozen=True)
class Positional:
    """One argument without a flag, e.g. MODEL. `default` is used when it is left out and not required."""

    name: str
    help: str
    parse: Callable[[str], Any] = str
    is_required: bool = True
    default: Any = None
    choices: tuple[str, ...] = ()


class Values:
    """What a program was given, by attribute: `values.kvd_memory`. Unknown names raise AttributeError."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str], rest: tuple[str, ...]) -> None:
        self._values = dict(values)
        self._sources = dict(sources)
        self.rest = rest

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no option named {name!r}")
        return self._values[name]

    def source(self, name: str) -> str:
        """Where the value came from: "flag", "argument", "environment NAME" or "default"."""
        return self._sources[name]

    def as_dict(self) -> dict[str, Any]:
        """A copy of all values by name."""
        return dict(self._values)

    def __repr__(self) -> str:
        # Values may be secrets (a join token), so only the names are shown.
        return f"Values({', '.join(sorted(self._values))})"


@dataclass
class _Scan:
    """What one pass over the command line found."""

    values: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, list[Any]] = field(default_factory=dict)
    bare: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    after_dashes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """A command with its options.

    `rest` names what may follow a lone `--` (e.g. "engine flags"); it is found in `values.rest`.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    epilog: str = ""
    positionals: tuple[Positional, ...] = ()
    rest: str = ""

    def __post_init__(self) -> None:
        names = [option.name for option in self.options] + [p.name.lower() for p in self.positionals]
        twice = {name for name in names if names.count(name) > 1}
        if twice or "rest" in names:
            raise ValueError(f"{self.name}: option names used twice or reserved: {sorted(twice) or ['rest']}")

    def parse(self, argv: Sequence[str], environ: Mapping[str, str]) -> Values:
        """The values of a command line. Prints help or an error and raises SystemExit as a command does."""
        self._print_help_if_asked(argv)
        try:
            return self.resolve(argv, environ)
        except OptionError as error:
            self._exit_usage(error)

    def parse_known(self, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Values, list[str]]:
        """Like `parse`, but flags it does not know are returned verbatim, in order, with what follows `--`.

        A bare word right after an unknown flag is taken as that flag's value.
        """
        self._print_help_if_asked(argv)
        try:
            scan = self._scan(argv, keep_unknown=True)
            return self._values(scan, environ), scan.unknown + scan.after_dashes
        except OptionError as error:
            self._exit_usage(error)

    def resolve(self, argv: Sequence[str], environ: Mapping[str, str]) -> Values:
        """`parse` for callers that handle errors themselves: raises OptionError and knows no `--help`."""
        scan = self._scan(argv, keep_unknown=False)
        if scan.after_dashes and not self.rest:
            raise OptionError(f"{self.name} takes nothing after --; remove {' '.join(scan.after_dashes)!r}")
        return self._values(scan, environ)

    def help_text(self) -> str:
        """The text of `--help`."""
        words = [self.name, *(_positional_usage(p) for p in self.positionals)]
        words += ["[flags]"] if self.options else []
        words += [f"[-- {self.rest}]"] if self.rest else []
        lines = [f"usage: {' '.join(words)}", "", *textwrap.wrap(self.summary, HELP_WIDTH_COLUMNS)]
        if self.positionals:
            lines += ["", "Arguments:"]
            for positional in self.positionals:
                lines += _help_entry(positional.name, positional.help)
        for section, options in self._sections():
            lines += ["", f"{section}:"]
            for option in options:
                lines += _help_entry(option.usage, _help_with_facts(option))
        if self.epilog:
            lines += ["", self.epilog.rstrip()]
        return "\n".join(lines) + "\n"

    def reference_markdown(self) -> str:
        """The program's part of the reference page."""
        lines = [f"## {self.name}", "", self.summary, ""]
        for positional in self.positionals:
            lines += [f"- `{positional.name}`: {positional.help}"]
        if self.rest:
            lines += [f"- after `--`: {self.rest}"]
        for section, options in self._sections():
            lines += ["", f"### {section}", "", "| flag | variable | default | what |", "|---|---|---|---|"]
            lines += [_reference_row(option) for option in options]
        if self.epilog:
            lines += ["", "```", self.epilog.rstrip(), "```"]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"

    def _sections(self) -> list[tuple[str, list[Option]]]:
        sections: dict[str, list[Option]] = {}
        for option in self.options:
            sections.setdefault(option.section, []).append(option)
        return list(sections.items())

    def _print_help_if_asked(self, argv: Sequence[str]) -> None:
        before_dashes = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
        if "--help" in before_dashes or "-h" in before_dashes:
            sys.stdout.write(self.help_text())
            raise SystemExit(0)

    def _exit_usage(self, error: OptionError) -> NoReturn:
        sys.stderr.write(f"{self.name}: {error}\nTry: {self.name} --help\n")
        raise SystemExit(EXIT_USAGE)

    def _scan(self, argv: Sequence[str], *, keep_unknown: bool) -> _Scan:
        scan = _Scan()
        words = list(argv)
        by_flag = {option.flag: option for option in self.options}
        while words:
            word = words.pop(0)
            if word == "--":
                scan.after_dashes = words
                break
            if not word.startswith("-") or word == "-":
                scan.bare.append(word)
                continue
            flag, has_value, text = word.partition("=")
            off = by_flag.get("--" + flag[5:]) if flag.startswith("--no-") else None
            if option := by_flag.get(flag):
                _take(scan, option, text if has_value else None, words)
            elif off is not None and off.is_switch and not has_value:
                scan.values[off.name] = False
            elif keep_unknown:
                scan.unknown.append(word)
                if not has_value and words and not words[0].startswith("-"):
                    scan.unknown.append(words.pop(0))
            else:
                raise OptionError(f"unknown flag {flag}{_nearest(flag, list(by_flag))}")
        return scan

    def _values(self, scan: _Scan, environ: Mapping[str, str]) -> Values:
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        self._fill_positionals(scan.bare, values, sources)
        for option in self.options:
            name = option.name
            if name in scan.values or name in scan.repeated:
                values[name] = tuple(scan.repeated[name]) if option.repeatable else scan.values[name]
                sources[name] = "flag"
            elif option.env and environ.get(option.env):  # an empty variable counts as unset
                values[name] = option.environment_value(environ[option.env])
                sources[name] = f"environment {option.env}"
            elif option.is_required:
                hint = f" or set {option.env}" if option.env else ""
                raise OptionError(f"{option.flag} is missing; give {option.usage}{hint}")
            else:
                values[name] = option.default_value()
                sources[name] = "default"
        return Values(values, sources, tuple(scan.after_dashes))

    def _fill_positionals(self, bare: list[str], values: dict[str, Any], sources: dict[str, str]) -> None:
        if len(bare) > len(self.positionals):
            raise OptionError(f"unexpected argument {bare[len(self.positionals)]!r}")
        for index, positional in enumerate(self.positionals):
            name = positional.name.lower()
            if index >= len(bare):
                if positional.is_required:
                    raise OptionError(f"{positional.name} is missing: {positional.help}")
                values[name], sources[name] = positional.default, "default"
                continue
            text = bare[index]
            if positional.choices and text not in positional.choices:
                known = ", ".join(positional.choices)
                raise OptionError(f"{text!r} is not one of {known}{_nearest(text, positional.choices)}")
            try:
                values[name], sources[name] = positional.parse(text), "argument"
            except ValueError as error:
                raise OptionError(f"{positional.name}: {error}") from error


def _take(scan: _Scan, option: Option, text: str | None, words: list[str]) -> None:
    """Stores the value of one flag, taking it from the following word when it was not joined by `=`."""
    if option.is_switch:
        try:
            scan.values[option.name] = True if text is None else parse_switch(text)
        except OptionError as error:
            raise OptionError(f"{option.flag}: {error}") from error
        return
    if text is None:
        # A word that starts with two dashes is a forgotten value, not a value; `--x=--y` says it is meant.
        if not words or words[0].startswith("--"):
            raise OptionError(f"{option.flag} needs a value: {option.usage}")
        text = words.pop(0)
    value = option.value_of(text, option.flag)
    if option.repeatable:
        scan.repeated.setdefault(option.name, []).append(value)
    else:
        scan.values[option.name] = value


def did_you_mean(word: str, known: Sequence[str]) -> str | None:
    """The known word nearest to a misspelt one, or None when none is near."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _nearest(word: str, known: Sequence[str]) -> str:
    match = did_you_mean(word, known)
    return f"; did you mean {match}?" if match else ""


def _positional_usage(positional: Positional) -> str:
    return positional.name if positional.is_required else f"[{positional.name}]"


def _help_with_facts(option: Option) -> str:
    facts = []
    if option.choices:
        facts.append(f"one of {', '.join(option.choices)}")
    if option.default_text() and not option.is_switch:
        facts.append(f"default {option.default_text()}")
    if option.env:
        facts.append(f"variable {option.env}")
    if option.repeatable:
        facts.append("may be repeated")
    if option.is_required:
        facts.append("required")
    return f"{option.help} ({'; '.join(facts)})" if facts else option.help


def _help_entry(left: str, right: str) -> list[str]:
    indent = " " * HELP_INDENT_COLUMNS
    lines = textwrap.wrap(right, HELP_WIDTH_COLUMNS, initial_indent=indent, subsequent_indent=indent)
    if len(left) + 4 > HELP_INDENT_COLUMNS:
        return [f"  {left}", *lines]
    lines[0] = f"  {left}".ljust(HELP_INDENT_COLUMNS) + lines[0].lstrip()
    return lines


def _reference_row(option: Option) -> str:
    what = option.help
    if option.choices:
        what += f" One of {', '.join(f'`{choice}`' for choice in option.choices)}."
    if option.repeatable:
        what += " May be repeated; the variable takes a comma-separated list."
    if option.is_required:
        what += " Required."
    default = f"`{option.default_text()}`" if option.default_text() else ""
    variable = f"`{option.env}`" if option.env else ""
    cells = [f"`{option.usage}`", variable, default, what]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
