"""Owning a child process, with real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infera.tools.errors import ToolError
from infera.up.guard import living_members
from infera.up.process import Child, ChildDied, Guard

WAIT_LIMIT_S = 20.0
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {program!r}])
print("grandchild", child.pid, flush=True)
time.sleep(60)
"""


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, "not within the limit"
        time.sleep(0.02)


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


def python_child(guard: Guard, folder: Path, program: str, **options: int) -> Child:
    return Child("child", [sys.executable, "-c", program], log=folder / "child.log", guard=guard, **options)


def test_a_child_runs_in_a_group_of_its_own_and_ends_when_asked(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, "import time; time.sleep(60)")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert child.status() is None
    assert child.stop() == -signal.SIGTERM
    assert child.stop() == -signal.SIGTERM
    assert living_members(child.pid) == []


def test_a_child_that_does_not_listen_is_killed(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, STUBBORN)
    wait_until(lambda: "up" in child.log.read_text())
    assert child.stop(grace_s=0.2) == -signal.SIGKILL


def test_grandchildren_end_with_the_child(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, WITH_GRANDCHILD.format(program=STUBBORN))
    wait_until(lambda: "up" in child.log.read_text())
    assert len(living_members(child.pid)) == 2
    child.stop()
    assert living_members(child.pid) == []


def test_an_unexpected_end_is_told_with_the_end_of_the_log(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, "import sys; print('out of memory'); sys.exit(3)")
    wait_until(lambda: child.status() is not None)
    with pytest.raises(ChildDied, match=r"(?s)status 3.*out of memory"):
        child.check()
    assert child.stop() == 3


def test_a_wait_ends_at_once_when_the_child_dies(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, "import os; os.abort()")
    with pytest.raises(ChildDied, match="SIGABRT"):
        child.wait_ready(lambda: False, limit_s=WAIT_LIMIT_S)
    child.stop()


def test_a_wait_for_readiness_has_a_limit(guard: Guard, tmp_path: Path) -> None:
    child = python_child(guard, tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(ToolError, match="not ready within 0 s"):
        child.wait_ready(lambda: False, limit_s=0.3)
    child.stop()


def test_a_log_never_grows_without_bound(guard: Guard, tmp_path: Path) -> None:
    program = (
        "import time\nfor i in range(2000): print('line', i, flush=True)\nprint('end', flush=True); time.sleep(60)"
    )
    child = python_child(guard, tmp_path, program, log_limit_bytes=4096)
    wait_until(lambda: "end" in child.log.read_text())
    child.check()
    older = tmp_path / "child.log.1"
    assert child.log.stat().st_size <= 4096
    assert older.stat().st_size <= 4096
    assert older.read_text().endswith("end\n")
    child.stop()


def test_a_program_that_does_not_exist_is_a_clear_error(guard: Guard, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="could not be started"):
        Child("ghost", ["/does/not/exist"], log=tmp_path / "log", guard=guard)


SUPERVISOR = """
import sys, time
from pathlib import Path
from infera.up.process import Child, Guard
guard = Guard()
child = Child("child", [sys.executable, "-c", sys.argv[1]], log=Path(sys.argv[2]), guard=guard)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_is_left_when_the_supervisor_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    # A grandchild that listens to SIGTERM stays where the child does not pass it on: only the guard ends it.
    program = WITH_GRANDCHILD.format(program="import time; print('up', flush=True); time.sleep(60)")
    argv = [sys.executable, "-c", SUPERVISOR, program, str(log)]
    supervisor = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    group = int(supervisor.stdout.readline())
    wait_until(lambda: log.exists() and "up" in log.read_text())
    assert len(living_members(group)) == 2
    supervisor.send_signal(number)
    supervisor.wait()
    supervisor.stdout.close()
    wait_until(lambda: living_members(group) == [])


def test_folders_are_removed_when_all_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "shared memory"
    folder.mkdir()
    (folder / "arena").write_text("x")
    guard = Guard()
    guard.remove_at_end(folder)
    assert folder.is_dir()
    guard.close()
    assert not folder.exists()
