"""Runs a command that may take long: bounded, with its output in a log and progress lines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infera.tools.errors import ToolError
from infera.tools.progress import Progress

POLL_S = 0.1
LOG_TAIL_BYTES = 4000


def run_logged(
    argv: Sequence[str],
    *,
    what: str,
    log: Path,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    detail: Callable[[], str] | None = None,
) -> None:
    """Runs a command to its end, appending its output to `log`.

    `what` names the step in progress lines, `detail` adds to them. Raises ToolError with the tail of the log when the
    command fails, and after killing its process group when it takes longer than `limit_s` seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(what)
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ) if environ is not None else None,
            cwd=folder,
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                if progress.elapsed_s > limit_s:
                    raise ToolError(f"{what} took longer than {limit_s:.0f} s and was stopped; its output: {log}")
                progress.tick(detail() if detail else "")
                time.sleep(POLL_S)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode != 0:
        raise ToolError(f"{what} failed with status {child.returncode}; the end of {log}:\n{tail(log)}")


def tail(log: Path, size_bytes: int = LOG_TAIL_BYTES) -> str:
    """The last bytes of a log as text, beginning with a whole line; empty when there is none."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size_bytes))
            data = file.read(size_bytes)
    except OSError:
        return ""
    if end > size_bytes:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace").rstrip()
