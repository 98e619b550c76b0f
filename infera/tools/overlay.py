"""The overlay: one folder that turns an unmodified engine into a worker when it is first on PYTHONPATH.

It holds our packages, the plugins, what they need and the engine's Python lacks, and `sitecustomize.py` at its top.
Its name is the digest of our sources and of the engine's Python: editing a source makes a new overlay.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from infera.tools.cachefolder import cache_folder, digest_of, file_lock
from infera.tools.commands import run_logged
from infera.tools.engine_python import RUNTIME_MODULES, EnginePython, environment_without_infera
from infera.tools.errors import ToolError
from infera.tools.progress import Progress, say
from infera.tools.sources import checkout_folder, source_digest
from infera.tools.wheels import ensure_wheels

INSTALL_LIMIT_S = 10 * 60.0
OVERLAYS_KEPT_MIN = 4
UNUSED_AGE_MIN_S = 7 * 86400.0
MARKER_NAME = "overlay.json"
OWN_DISTRIBUTIONS = ("infera", "infera-plugin-vllm", "infera-plugin-sglang", "infera-plugin-atom")


def ensure_overlay(engine_python: EnginePython, cache: Path | None = None) -> Path:
    """The overlay for an engine's Python, built first when there is none for our present sources (about 20 s).

    Raises ToolError when a wheel does not build or install, or the bootstrap file is missing.
    """
    cache = cache or cache_folder()
    root = checkout_folder()
    ours = source_digest(root) if root else _installed_digest()
    folder = cache / "overlays" / digest_of([ours.encode(), engine_python.identity.encode()])
    if not _is_ready(folder):
        with file_lock(folder.parent / "build.lock", "building an overlay"):
            if not _is_ready(folder):
                _build(folder, engine_python, cache, root)
                remove_old_folders(folder.parent)
                remove_old_folders(cache / "wheels")
    os.utime(folder)
    return folder


def _is_ready(folder: Path) -> bool:
    return (folder / MARKER_NAME).is_file()


def _build(folder: Path, engine_python: EnginePython, cache: Path, root: Path | None) -> None:
    progress = Progress("overlay")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as temporary:
        target = Path(temporary) / "overlay"
        target.mkdir(mode=0o755)
        log = folder.parent / "build.log"
        log.unlink(missing_ok=True)
        if root is not None:
            _pip_install(engine_python, target, [str(wheel) for wheel in ensure_wheels(root, cache)], log)
        else:
            _copy_installed(target)
        pins = [_pin_of(RUNTIME_MODULES[module]) for module in engine_python.missing_modules]
        if pins:
            _pip_install(engine_python, target, pins, log)
        _copy_bootstrap(target, root)
        facts = {
            "engine_python": str(engine_python.python),
            "engine": engine_python.engine,
            "built_unix_s": time.time(),
        }
        (target / MARKER_NAME).write_text(json.dumps(facts) + "\n")
        target.rename(folder)
    progress.done(f"ready in {folder}")


def _pip_install(engine_python: EnginePython, target: Path, requirements: list[str], log: Path) -> None:
    # Our own pip, run by the engine's interpreter: environments made by other tools have no pip.
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(engine_python.python),
        "--disable-pip-version-check",
        "install",
    ]
    argv += ["--no-input", "--no-deps", "--upgrade", "--target", str(target), *requirements]
    environ = environment_without_infera()
    environ.pop("PYTHONPATH", None)
    run_logged(argv, what="installing into the overlay", log=log, limit_s=INSTALL_LIMIT_S, environ=environ)


def _pin_of(distribution: str) -> str:
    return f"{distribution}=={importlib.metadata.version(distribution)}"


def _copy_bootstrap(target: Path, root: Path | None) -> None:
    package = root / "infera" if root else Path(__file__).resolve().parents[1]
    source = package / "hooks" / "site" / "sitecustomize.py"
    if not source.is_file():
        raise ToolError(f"{source} is missing from this installation of infera; install it again")
    shutil.copyfile(source, target / "sitecustomize.py")


def _installed_digest() -> str:
    versions = []
    for name in OWN_DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions.append(f"{name}=={distribution.version}\n{distribution.read_text('RECORD') or ''}".encode())
    return digest_of(versions)


def _copy_installed(target: Path) -> None:
    """Copies our installed distributions as they are: they are pure Python, but for one stable-ABI module."""
    for name in OWN_DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            if ".." in file.parts or file.suffix == ".pyc":
                continue  # console scripts and bytecode belong to the other environment
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(distribution.locate_file(file), target / file)  # type: ignore[arg-type]


def remove_old_folders(parent: Path, *, kept_min: int = OVERLAYS_KEPT_MIN, age_min_s: float = UNUSED_AGE_MIN_S) -> None:
    """Removes folders beyond the newest `kept_min` that nobody has asked for in `age_min_s` and no process names."""
    if not parent.is_dir():
        return
    folders = [path for path in parent.iterdir() if path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders[kept_min:]:
        if time.time() - folder.stat().st_mtime > age_min_s and not _is_in_use(folder):
            say(f"removing {folder.name} from {parent}: unused for {age_min_s / 86400:.0f} days")
            shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    """Whether a running process names the folder: an engine may import from it weeks after its start."""
    needle = os.fsencode(folder)
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if needle in environ.read_bytes():
                return True
        except OSError:
            continue
    return False
