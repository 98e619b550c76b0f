"""Ends the process groups of a supervisor that died. Started by it, reads its orders from standard input.

Each line is `watch GROUP`, `forget GROUP` or `remove FOLDER`. End of input means that the supervisor is gone, by
whatever cause: then every group still watched is asked to end, and killed after a grace, and the folders (of shared
memory and sockets) are removed. A child's own parent-death signal reaches only that child; engines have children of
their own, and those are what this is for. It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

GRACE_S = 10.0
STRAGGLER_GRACE_S = 2.0
POLL_S = 0.1
LINE_LETTERS_MAX = 4096


def main() -> int:
    """Reads orders until the supervisor is gone, then ends what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of input ends a guard
    groups: list[int] = []
    folders: list[str] = []
    for line in iter(lambda: sys.stdin.readline(LINE_LETTERS_MAX), ""):
        order, _, text = line.rstrip("\n").partition(" ")
        if order == "remove":
            folders.append(text)
        elif order == "watch":
            groups.append(int(text))
        elif int(text) in groups:
            groups.remove(int(text))
    end_groups(groups)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def end_groups(groups: list[int], grace_s: float = GRACE_S) -> None:
    """Asks the leaders to end, in reverse order of their start, and kills what is left after the grace."""
    for group in reversed(groups):
        _signal_quietly(os.kill, group, signal.SIGTERM)
    _wait(lambda: not any(group in living_members(group) for group in groups), grace_s)
    _wait(lambda: not any(living_members(group) for group in groups), STRAGGLER_GRACE_S)
    for group in groups:
        if living_members(group):
            _signal_quietly(os.killpg, group, signal.SIGKILL)


def _wait(is_done: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def living_members(group: int) -> list[int]:
    """The process ids of a process group, without those that are dead and not yet reaped."""
    members = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command's name, in parentheses, may hold anything; the fields after it are plain.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state, process_group = fields[0], int(fields[2])
        if process_group == group and state not in (b"Z", b"X"):
            members.append(int(name))
    return members


def _signal_quietly(send: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)


if __name__ == "__main__":
    raise SystemExit(main())
