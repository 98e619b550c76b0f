"""Overlays: the removal of old ones. Building one is tested with a real interpreter in tests/integration."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from infera.tools.overlay import remove_old_folders

DAY_S = 86400.0


def folder_of_age(parent: Path, name: str, age_s: float) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "file").write_text("x")
    then_s = time.time() - age_s
    os.utime(folder, (then_s, then_s))
    return folder


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_the_newest_four_stay_however_old(tmp_path: Path) -> None:
    for index in range(6):
        folder_of_age(tmp_path, f"f{index}", (10 + index) * DAY_S)
    remove_old_folders(tmp_path)
    assert names(tmp_path) == {"f0", "f1", "f2", "f3"}


def test_what_was_used_within_a_week_stays(tmp_path: Path) -> None:
    for index in range(8):
        folder_of_age(tmp_path, f"f{index}", index * DAY_S)
    remove_old_folders(tmp_path)
    assert names(tmp_path) == {f"f{index}" for index in range(7)}


def test_what_a_process_uses_stays(tmp_path: Path) -> None:
    used = folder_of_age(tmp_path, "used", 30 * DAY_S)
    folder_of_age(tmp_path, "unused", 31 * DAY_S)
    argv = [sys.executable, "-c", "print('up', flush=True); input()"]
    environ = {**os.environ, "PYTHONPATH": str(used)}
    with subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        remove_old_folders(tmp_path, kept_min=0)
        assert names(tmp_path) == {"used"}
        process.communicate("\n")
    remove_old_folders(tmp_path, kept_min=0)
    assert names(tmp_path) == set()


def test_a_parent_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_old_folders(tmp_path / "none")
