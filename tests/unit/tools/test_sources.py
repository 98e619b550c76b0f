"""The digest of our sources."""

from __future__ import annotations

from pathlib import Path

from infera.tools.sources import checkout_folder, source_digest, source_files


def small_tree(root: Path) -> None:
    for name in ("csrc/a.c", "kvd/b.py", "infera/c.py", "plugins/x/pyproject.toml", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_it_changes_with_an_edit_and_with_a_name_only(tmp_path: Path) -> None:
    small_tree(tmp_path)
    before = source_digest(tmp_path)
    assert source_digest(tmp_path) == before
    (tmp_path / "kvd" / "b.py").write_text("edited")
    edited = source_digest(tmp_path)
    assert edited != before
    (tmp_path / "kvd" / "b.py").rename(tmp_path / "kvd" / "renamed.py")
    assert source_digest(tmp_path) != edited


def test_what_a_build_leaves_behind_does_not_count(tmp_path: Path) -> None:
    small_tree(tmp_path)
    before = source_digest(tmp_path)
    for name in ("csrc/infera_core/_native.c", "kvd/__pycache__/b.py", "infera/notes.md", "plugins/x/build/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert source_digest(tmp_path) == before


def test_the_checkout_finds_itself() -> None:
    root = checkout_folder()
    assert root is not None
    files = source_files(root)
    assert Path("infera/tools/sources.py") in files
    assert Path("csrc/build_ffi.py") in files
