"""`infera-kvd check`: verify a disk store offline."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvd.disk_check import CheckError, Report, check
from kvd.program import CHECK


def run(arguments: list[str]) -> int:
    """Check one folder: 0 when nothing bad is left, 1 when there is, 2 when it cannot be checked."""
    values = CHECK.parse(arguments, os.environ)
    is_shown = sys.stderr.isatty() and not values.json

    def progress(done: int, total: int) -> None:
        if is_shown:
            print(f"\rsegment {done + 1} of {total}", end="", file=sys.stderr, flush=True)

    try:
        report = check(Path(values.path), drop=values.drop, progress=progress)
    except (CheckError, OSError) as error:
        print(f"infera-kvd check: {error}", file=sys.stderr)
        return 2
    finally:
        if is_shown:
            print("\r\033[K", end="", file=sys.stderr)
    print(json.dumps(as_json(report)) if values.json else as_text(report))
    return 0 if report.is_clean else 1


def as_json(report: Report) -> dict[str, object]:
    """The report for a program."""
    return {
        "path": report.path,
        "segments": report.segments,
        "segments_unused": report.segments_unused,
        "records": report.records,
        "void_records": report.void_records,
        "object_bytes": report.object_bytes,
        "bad": dict(report.bad),
        "dropped": report.dropped,
        "findings": report.findings,
        "is_clean": report.is_clean,
    }


def as_text(report: Report) -> str:
    """The report for a person."""
    bad = sum(report.bad.values())
    size = f"{report.object_bytes >> 20} MiB"
    lines = [f"{report.path}: {report.segments} segments, {report.records} good records, {size}"]
    lines += [f"  {finding}" for finding in report.findings]
    if bad > len(report.findings):
        lines.append(f"  and {bad - len(report.findings)} more")
    if not bad:
        lines.append("nothing is wrong with it")
    elif report.dropped:
        lines.append(f"{bad} bad, {report.dropped} taken out")
    else:
        lines.append(f"{bad} bad; add --drop to take them out (the daemon serves none of them either way)")
    return "\n".join(lines)
