"""The cache folder: its place, names and locks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infera.tools.cachefolder import cache_folder, digest_of, file_lock
from infera.tools.errors import ToolError

HOLDER = """
import sys
from pathlib import Path
from infera.tools.cachefolder import file_lock
with file_lock(Path(sys.argv[1]), "holding it"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_where_it_is() -> None:
    assert cache_folder({"INFERA_CACHE_DIR": "/a/b"}) == Path("/a/b")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/infera")
    assert cache_folder({}) == Path.home() / ".cache" / "infera"


def test_borders_count_in_a_digest() -> None:
    assert digest_of([b"ab", b"c"]) != digest_of([b"a", b"bc"])
    assert digest_of([b"ab"]) == digest_of([b"ab"])


def test_a_lock_held_elsewhere_is_waited_for_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ToolError, match="fuser"), file_lock(path, "waiting", limit_s=0.1):
            pass
        holder.kill()
    with file_lock(path, "waiting", limit_s=5.0):  # the kernel freed it with its owner
        pass


def test_a_lock_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with file_lock(tmp_path / "sub" / "lock", "testing", limit_s=1.0):
            pass
