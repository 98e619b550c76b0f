"""`infera-kvd ls`: classes, or the records of a namespace, a page at a time."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvd.commands.asking import LONG_S, Asker, with_daemon
from kvd.options import EXIT_USAGE, Values
from kvd.program import LS
from kvd.protocol import Message

Rows = list[dict[str, Any]]

CLASS_COLUMNS = ("id", "namespace", "group", "records", "mib", "shards", "record_bytes", "model")
RECORD_COLUMNS = ("key", "group", "depth_tokens", "bytes", "shards", "present", "retention")


def run(arguments: list[str]) -> int:
    """Print the listing; returns the exit status."""
    values = LS.parse(arguments, os.environ)
    if values.keys and not values.namespace:
        print("infera-kvd ls: --keys needs a NAMESPACE; `infera-kvd ls` lists them", file=sys.stderr)
        return EXIT_USAGE
    work = _list_records if values.keys else _list_classes
    return with_daemon(values, lambda asker: work(asker, values), LONG_S)


def _list_classes(asker: Asker, values: Values) -> int:
    classes: Rows = asker.ask(Message.STATUS)["classes"]
    shown = [kind for kind in classes if values.namespace in (None, kind["namespace"])][: values.limit]
    if values.json:
        print(json.dumps({"classes": shown}))
        return 0
    for kind in shown:
        kind["mib"] = round(kind["records"] * kind["record_bytes"] / 2**20, 1)
    print(table(shown, CLASS_COLUMNS))
    return 0


def _list_records(asker: Asker, values: Values) -> int:
    records: Rows = []
    cursor: int | None = values.after or 0
    while cursor is not None and len(records) < values.limit:
        request = {"namespace": values.namespace, "cursor": cursor, "limit": values.limit - len(records)}
        page = asker.ask(Message.LIST, request)
        records += page["records"]
        cursor = page["next"]
    if values.json:
        print(json.dumps({"records": records, "next": cursor}))
        return 0
    print(table(records, RECORD_COLUMNS))
    if cursor is not None:
        print(f"more: add --after {cursor}")
    return 0


def table(rows: Rows, columns: tuple[str, ...]) -> str:
    """Rows under a head, columns as wide as they need; numbers to the right."""
    cells = [[_text(row[column]) for column in columns] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(columns)]
    is_number = [bool(rows) and all(type(row[column]) in (int, float) for row in rows) for column in columns]
    lines = []
    for row in [list(columns), *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
