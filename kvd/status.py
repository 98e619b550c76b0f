"""How `infera-kvd status` looks to a person."""

from __future__ import annotations

from typing import Any


def render_status(facts: dict[str, Any]) -> str:
    """Return a few lines that say how full the daemon is, for whom, and what it refused."""
    metrics: dict[str, int] = facts["metrics"]
    lines = [
        f"infera-kvd {facts['version']}  pid {facts['pid']}  socket {facts['socket']}",
        _line("memory", metrics, "{used} of {total} used ({percent}%), {quarantined} in quarantine"),
        _line(
            "records",
            metrics,
            "{records_present} present, {records_incomplete} being written, room for {record_capacity}",
        ),
        _line("traffic", metrics, "{stored_total} stored, {evicted_total} evicted, {touched_total} touched"),
        _line(
            "refused",
            metrics,
            "{reserve_no_space_total} no space, {reserve_limit_total} over limit, {commit_stale_total} stale commits, "
            "{malformed_frames_total} malformed frames",
        ),
        f"clients  {len(facts['clients'])}",
    ]
    lines += [f"  {client['number']:3} {client['name']} pid {client['pid']}" for client in facts["clients"]]
    lines.append(f"classes  {len(facts['classes'])}")
    lines += [
        f"  {kind['id']:3} namespace {kind['namespace']} group {kind['group']} model {kind['model']}"
        for kind in facts["classes"]
    ]
    return "\n".join(lines)


def _line(title: str, metrics: dict[str, int], template: str) -> str:
    values: dict[str, object] = dict(metrics)
    values |= {
        "used": _mib(metrics["used_bytes"]),
        "total": _mib(metrics["data_bytes"]),
        "quarantined": _mib(metrics["quarantined_bytes"]),
        "percent": round(100 * metrics["used_bytes"] / metrics["data_bytes"]),
    }
    return f"{title:8} {template.format(**values)}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
