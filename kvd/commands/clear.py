"""`infera-kvd clear`: give the memory of an arena back that nobody uses."""

from __future__ import annotations

import json
import os
import sys

from kvd.arena_files import ArenaFolder, ArenaFolderError
from kvd.arena_start import live_ledgers
from kvd.program import CLEAR, arena_folder


def run(arguments: list[str]) -> int:
    """Remove the arena's files; returns the exit status."""
    values = CLEAR.parse(arguments, os.environ)
    path = arena_folder(values.path)
    freed_bytes = 0
    try:
        if path.exists():
            freed_bytes = _clear(ArenaFolder(path))
    except (ArenaFolderError, OSError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"freed_bytes": freed_bytes}) if values.json else f"freed {freed_bytes >> 20} MiB in {path}")
    return 0


def _clear(folder: ArenaFolder) -> int:
    try:
        live = live_ledgers(folder)
        for ledger in live:
            ledger.close(keep=True)
        if live:
            raise ArenaFolderError(
                f"{len(live)} processes still use the arena in {folder.path} and would keep its memory; stop these "
                "engines first, or start infera-kvd again"
            )
        return folder.remove_left_overs()
    finally:
        folder.close()
