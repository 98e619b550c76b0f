"""`infera-kvd top`: one screen of what the daemon does, again and again."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from kvd.commands.asking import Asker, with_daemon
from kvd.commands.ls import table
from kvd.options import Values
from kvd.program import TOP
from kvd.protocol import Message

CLEAR_SCREEN = "\x1b[H\x1b[2J"
ROWS_MAX = 12
"""Classes and clients shown, so that the screen stays one."""
RATES = ("stored_total", "evicted_total", "touched_total", "reserve_exists_total", "reserve_no_space_total")
BAR_CELLS = 40


def run(arguments: list[str]) -> int:
    """Show it until interrupted, or once; returns the exit status."""
    values = TOP.parse(arguments, os.environ)
    try:
        return with_daemon(values, lambda asker: _watch(asker, values))
    except KeyboardInterrupt:
        return 0


def _watch(asker: Asker, values: Values) -> int:
    before: dict[str, Any] | None = None
    before_s = 0.0
    while True:
        facts = asker.ask(Message.STATUS)
        now_s = time.monotonic()
        rates = rates_per_s(before, facts, now_s - before_s) if before else None
        if values.json:
            print(json.dumps(facts | {"rates_per_s": rates}), flush=True)
        else:
            head = "" if values.once or not sys.stdout.isatty() else CLEAR_SCREEN
            print(head + screen(facts, rates), flush=True)
        if values.once:
            return 0
        before, before_s = facts, now_s
        time.sleep(values.interval)


def rates_per_s(before: dict[str, Any], after: dict[str, Any], elapsed_s: float) -> dict[str, float]:
    """How fast the counters of RATES grew between two answers; a restarted daemon begins at zero again."""
    old, new = before["metrics"], after["metrics"]
    grown = {name: new[name] - old[name] if new[name] >= old[name] else new[name] for name in RATES}
    return {name.removesuffix("_total"): round(count / max(elapsed_s, 1e-3), 1) for name, count in grown.items()}


def screen(facts: dict[str, Any], rates: dict[str, float] | None) -> str:
    """The text of one screen."""
    metrics = facts["metrics"]
    share = metrics["used_bytes"] / metrics["data_bytes"]
    full = round(share * BAR_CELLS)
    lines = [
        f"infera-kvd {facts['version']}  pid {facts['pid']}  {facts['socket']}",
        f"memory   [{'#' * full}{'.' * (BAR_CELLS - full)}] {share:4.0%} of {metrics['data_bytes'] >> 20:,} MiB",
        f"records  {metrics['records_present']:,} of {metrics['record_capacity']:,}",
        (
            f"writing  {metrics['records_incomplete']:,} records, {metrics['reservations']:,} reservations, "
            f"{metrics['quarantined_bytes'] >> 20:,} MiB in quarantine"
        ),
    ]
    if rates:
        lines.append("per s    " + "  ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
    else:
        lines.append("total    " + "  ".join(f"{name.removesuffix('_total')} {metrics[name]:,}" for name in RATES))
    classes = sorted(facts["classes"], key=lambda kind: -kind["records"] * kind["record_bytes"])
    for kind in classes:
        kind["mib"] = kind["records"] * kind["record_bytes"] >> 20
    lines += ["", *_rows(classes, ("namespace", "group", "records", "mib", "model"), "class")]
    lines += ["", *_rows(facts["clients"], ("number", "pid", "name"), "client")]
    return "\n".join(lines)


def _rows(rows: list[dict[str, Any]], columns: tuple[str, ...], what: str) -> list[str]:
    if not rows:
        return [f"no {what}"]
    lines = table(rows[:ROWS_MAX], columns).split("\n")
    return lines if len(rows) <= ROWS_MAX else [*lines, f"and {len(rows) - ROWS_MAX} more"]
