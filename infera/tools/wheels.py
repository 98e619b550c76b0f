"""Wheels of Infera and its plugins, built once per state of the sources and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infera.tools.cachefolder import file_lock
from infera.tools.commands import run_logged
from infera.tools.progress import say
from infera.tools.sources import SOURCE_FOLDERS, source_digest, source_files

BUILD_LIMIT_S = 10 * 60.0
EXTRA_FILES = ("README.md", "LICENSE", "MANIFEST.in", "requirements")


def plugin_projects(root: Path) -> list[Path]:
    """The folders of the plugin distributions of a checkout."""
    return sorted(path.parent for path in (root / "plugins").glob("*/pyproject.toml"))


def ensure_wheels(root: Path, cache: Path) -> list[Path]:
    """The wheels of a checkout, infera's first. Raises ToolError when one does not build."""
    folder = cache / "wheels" / source_digest(root)
    if folder.is_dir():
        os.utime(folder)
        return sorted(folder.glob("*.whl"))
    with file_lock(folder.with_name("build.lock"), "building wheels of infera"):
        if not folder.is_dir():
            _build(root, folder)
    return sorted(folder.glob("*.whl"))


def _build(root: Path, folder: Path) -> None:
    say("building the wheels of infera and its plugins")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as temporary:
        # A copy, because setuptools keeps what an earlier build left in the tree, even of modules deleted since.
        copy, output = Path(temporary) / "source", Path(temporary) / "wheels"
        _copy_sources(root, copy)
        projects = [copy, *plugin_projects(copy)]
        log = Path(temporary) / "build.log"
        for project in projects:
            run_logged(_wheel_command(project, output), what=f"building {project.name}", log=log, limit_s=BUILD_LIMIT_S)
        output.rename(folder)


def _wheel_command(project: Path, output: Path) -> Sequence[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-input", "--no-deps"]
    return [*command, "--no-build-isolation", "--wheel-dir", str(output), str(project)]


def _copy_sources(root: Path, copy: Path) -> None:
    for path in source_files(root):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, copy / path)
    for name in EXTRA_FILES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name)
        elif (root / name).is_file():
            shutil.copyfile(root / name, copy / name)
    for folder in SOURCE_FOLDERS:
        for marker in (root / folder).rglob("py.typed"):
            relative = marker.relative_to(root)
            if (copy / relative).parent.is_dir():
                shutil.copyfile(marker, copy / relative)
