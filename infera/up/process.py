"""One child process, owned from its first moment to its last.

It gets a session and process group of its own, a signal when its parent dies, a log of limited size for what it prints,
and an end: asked first, killed with its whole group after a grace. Its process id stays reserved until its group has
gone, so a signal never reaches a stranger.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from infera.tools.commands import tail
from infera.tools.errors import ToolError
from infera.tools.progress import Progress
from infera.up.guard import living_members

LOG_LIMIT_BYTES = 32 * 2**20
POLL_S = 0.1
# Longer than a server takes to let go of the requests under way.
STOP_GRACE_S = 40.0
KILL_LIMIT_S = 10.0
STRAGGLER_GRACE_S = 2.0
GUARD_STOP_LIMIT_S = 15.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChildDied(ToolError):
    """A child ended when it should not have; the text holds the end of its log."""


class Guard:
    """The process that ends our children's groups should we be killed. Its limit on groups is ours on children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infera.up.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """Has a process group ended if we die."""
        self._tell(f"watch {group}\n")

    def forget(self, group: int) -> None:
        """Takes back `watch` once the group is gone."""
        self._tell(f"forget {group}\n")

    def remove_at_end(self, folder: Path) -> None:
        """Has a folder removed when all has ended, whether we live until then or not."""
        self._tell(f"remove {folder}\n")

    def close(self) -> None:
        """Ends the guard; groups still watched end with it."""
        pipe = self._pipe()
        if not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(GUARD_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        try:
            self._pipe().write(line)
            self._pipe().flush()
        except (BrokenPipeError, ValueError) as error:
            raise ToolError("the guard process has ended; stop this run and start it again") from error

    def _pipe(self) -> IO[str]:
        pipe = self._process.stdin
        assert pipe is not None
        return pipe


class Child:
    """A running child. Start it from the main thread: the kernel ties the parent-death signal to the thread."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        guard: Guard,
        environ: Mapping[str, str] | None = None,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
    ) -> None:
        """Starts the child. Raises ToolError when the program cannot be run."""
        self.name = name
        self.log = log
        self.is_stopping = False
        self._guard = guard
        self._log_limit_bytes = log_limit_bytes
        self._is_reaped = False
        log.parent.mkdir(parents=True, exist_ok=True)
        # Appending, so that cutting the file off makes the next write land at its new end.
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ToolError(f"{name} could not be started: {error}") from error
        finally:
            os.close(descriptor)
        guard.watch(self.pid)

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group."""
        return self._process.pid

    def status(self) -> int | None:
        """None while it runs, else its exit status (negative: the signal that ended it)."""
        if self._is_reaped:
            return self._process.returncode
        # Left as a zombie until its group is gone; until then its id cannot be given to another process.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def check(self) -> None:
        """Raises ChildDied when it has ended without being asked to; else keeps its log within the limit."""
        status = self.status()
        if status is not None and not self.is_stopping:
            raise ChildDied(self.obituary(status))
        self.limit_log()

    def obituary(self, status: int) -> str:
        """How it ended, with the end of its log."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self.name} (process {self.pid}) ended with {how}; the end of {self.log}:\n{tail(self.log)}"

    def wait_ready(
        self, is_ready: Callable[[], bool], *, limit_s: float, what: str = "is ready", poll_s: float = POLL_S
    ) -> None:
        """Waits until `is_ready` says so. Raises ChildDied when the child ends, ToolError after `limit_s` seconds."""
        progress = Progress(f"waiting until {self.name} {what}")
        while True:
            self.check()
            if is_ready():
                return
            if progress.elapsed_s > limit_s:
                raise ToolError(
                    f"{self.name} was not ready within {limit_s:.0f} s; the end of {self.log}:\n{tail(self.log)}"
                )
            progress.tick()
            time.sleep(poll_s)

    def ask_to_stop(self) -> None:
        """Asks the child to end, without waiting. Its own children are its business."""
        self.is_stopping = True
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Ends the child and its group: asked, then killed after the grace. Returns its status; may be repeated."""
        if not self._is_reaped:
            self.ask_to_stop()
            has_ended = self._wait(lambda: self.status() is not None, grace_s)
            if not has_ended or not self._wait(lambda: not living_members(self.pid), STRAGGLER_GRACE_S):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait(lambda: self.status() is not None and not living_members(self.pid), KILL_LIMIT_S)
            self._process.wait(KILL_LIMIT_S)
            self._is_reaped = True
            self._guard.forget(self.pid)
        return self._process.returncode

    def kill(self) -> None:
        """Kills the whole group at once, as a crash would; `stop` still has to be called."""
        self.is_stopping = True
        if not self._is_reaped:
            os.killpg(self.pid, signal.SIGKILL)

    def limit_log(self) -> None:
        """Moves the newer half of a log that is too long to NAME.1 and begins anew."""
        size_bytes = self.log.stat().st_size
        if size_bytes <= self._log_limit_bytes:
            return
        kept = tail(self.log, self._log_limit_bytes // 2)
        self.log.with_name(self.log.name + ".1").write_text(kept + "\n")
        os.truncate(self.log, 0)

    def _wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not is_done():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child does before it becomes its program: asks for SIGTERM when its parent dies."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare
