"""The facts file of a running engine, in the runtime folder: what was wired, and what its connector made of it.

Written by the hook before the engine starts, added to by the engine's processes, read by the agent and by
`infera doctor`. It names its process by id and start time, so that a file left behind is not taken for an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINE_FACTS = "INFERA_ENGINE_FACTS"
FILES_MAX = 256
"""More engines than this on one host are not listed, and as many files are looked at for removal."""
_PREFIX = "engine-"


def facts_path(runtime_dir: str, incarnation: str) -> Path:
    """Where the facts of one launch are."""
    return Path(runtime_dir) / f"{_PREFIX}{incarnation}.json"


def begin_facts(path: Path, facts: Mapping[str, object]) -> None:
    """Write what this process, which launches an engine, knows of it; remove what ended engines left.

    Raises:
        OSError: when the folder cannot be written to.
    """
    for old in _files(path.parent):
        if not _is_live(_read(old)):
            old.unlink(missing_ok=True)
    _write(path, {"pid": os.getpid(), "start_ticks": _start_ticks(os.getpid()), **facts})


def add_facts(environ: Mapping[str, str], facts: Mapping[str, object]) -> None:
    """Add to this engine's file, from any of its processes. Without a file nobody asked for it."""
    if path := environ.get(ENGINE_FACTS):
        _write(Path(path), {**_read(Path(path)), **facts})


def live_engines(runtime_dir: Path) -> list[dict[str, Any]]:
    """The facts of the engines whose processes are running, of this folder and those in it: `infera up` makes one for
    each fleet."""
    folders = [runtime_dir, *sorted(path for path in runtime_dir.glob("*") if path.is_dir())]
    paths = [path for folder in folders for path in _files(folder)][:FILES_MAX]
    return [facts for path in paths if _is_live(facts := _read(path))]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*.json"))[:FILES_MAX]


def _read(path: Path) -> dict[str, Any]:
    """Empty for a file that is gone or is none of ours."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, facts: Mapping[str, object]) -> None:
    """Whole or not at all; several processes of an engine may write at once."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(facts, file)
    fresh.replace(path)


def _is_live(facts: Mapping[str, Any]) -> bool:
    pid = facts.get("pid")
    return isinstance(pid, int) and facts.get("start_ticks") == _start_ticks(pid) is not None


def _start_ticks(pid: int) -> int | None:
    """When a process began, in ticks since boot; None when there is none of this id."""
    try:
        # The name, in parentheses, may have spaces in it; the start is the 20th field after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
