"""What a fleet on one host is made of."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from infera.tools.cachefolder import cache_folder
from infera.tools.engine_python import EnginePython

RUNS_KEPT_MAX = 10
SHARED_MEMORY_FOLDER = Path("/dev/shm")


def default_runtime_parent() -> Path:
    """Where sockets go: INFERA_RUNTIME_DIR, or `infera` below XDG_RUNTIME_DIR, or a folder of this user in /tmp."""
    if chosen := os.environ.get("INFERA_RUNTIME_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "infera"
    return Path("/tmp") / f"infera-{os.getuid()}"


@dataclass(frozen=True)
class FleetSettings:
    """Everything a fleet needs to know before it starts. `model` is a local folder or a name the engine can resolve."""

    model: str
    served_name: str
    engine_python: EnginePython
    overlay: Path
    run_folder: Path
    engines: int = 1
    port: int = 8000
    kvd_memory: str = "2G"
    keeps_arena: bool = True
    engine_flags: tuple[str, ...] = ()
    server_flags: tuple[str, ...] = ()
    runtime_parent: Path = field(default_factory=default_runtime_parent)

    @property
    def server_url(self) -> str:
        """Where clients and agents reach the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def runtime_folder(self) -> Path:
        """For sockets: short, because their paths have at most 107 bytes; private, because they lead to KV."""
        return self.runtime_parent / f"up-{self.port}"

    @property
    def kvd_socket(self) -> Path:
        """The socket of this fleet's cache daemon."""
        return self.runtime_folder / "kvd.sock"

    @property
    def arena_folder(self) -> Path:
        """Where the cache daemon keeps its memory: one per port, so that killed runs do not pile up."""
        base = SHARED_MEMORY_FOLDER if SHARED_MEMORY_FOLDER.is_dir() else self.run_folder
        return base / f"infera-up-{os.getuid()}-{self.port}"


def served_name_of(model: str) -> str:
    """The name clients use when none is given: the folder's last part, or the hub's name as it is."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def make_run_folder(cache: Path | None = None) -> Path:
    """A new folder for the logs of a run; beyond the newest ten, older ones are removed."""
    parent = (cache or cache_folder()) / "runs"
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)
    for old in sorted(path for path in parent.iterdir() if path.is_dir())[:-RUNS_KEPT_MAX]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
