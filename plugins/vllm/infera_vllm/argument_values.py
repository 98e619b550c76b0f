"""Values of vLLM's JSON flags, read as vLLM reads them: single keys, and numbers with a unit such as 80g."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_UNITS: Final = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")')
_NUMBER = re.compile(r"\b(\d+(?:\.\d+)?)([kKmMgGtT])\b")


def parse_json(text: str) -> Any:
    """JSON in which numbers outside of strings may have a unit: k is 1000, K is 1024.

    Raises:
        ValueError: for what is no JSON even so.
    """
    pieces = _STRINGS.split(text)
    pieces[::2] = [_NUMBER.sub(_expanded, piece) for piece in pieces[::2]]
    return json.loads("".join(pieces))


def _expanded(found: re.Match[str]) -> str:
    number, unit = found.groups()
    if "." in number and unit.isupper():
        return found.group()  # vLLM refuses fractions of powers of 1024
    return str(int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit])


def dotted_value(path: str, text: str) -> dict[str, Any]:
    """The object that `--flag.PATH TEXT` stands for; a path that ends with + takes a list, comma-separated."""
    value: Any
    if path.endswith("+"):
        path, value = path[:-1], text.split(",")
    else:
        try:
            value = parse_json(text)
        except ValueError:
            value = text
    for key in reversed(path.split(".")):
        value = {key: value}
    found: dict[str, Any] = value
    return found


def merge_nested(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Objects are merged, lists joined, anything else is replaced."""
    for key, value in more.items():
        there = into.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            merge_nested(there, value)
        elif isinstance(value, list) and isinstance(there, list):
            there += value
        else:
            into[key] = value
