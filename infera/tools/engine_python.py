"""Looks at a Python that has an engine, without importing the engine."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infera.tools.cachefolder import digest_of
from infera.tools.errors import ToolError

INSPECT_LIMIT_S = 60.0
OLDEST_PYTHON = (3, 11)

# What an engine's process needs beside our own packages: import name, distribution name.
RUNTIME_MODULES = {"pluggy": "pluggy", "_cffi_backend": "cffi", "zmq": "pyzmq", "msgspec": "msgspec"}

_INSPECTION = """
import importlib.metadata as metadata, importlib.util as util, json, sys
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None
engine, modules = sys.argv[1], sys.argv[2:]
print(json.dumps({
    "python": list(sys.version_info[:3]),
    "found": util.find_spec(engine) is not None,
    "version": version(engine, engine + "-cpu"),
    "is_cpu": version(engine + "-cpu") is not None or "cpu" in (version(engine) or ""),
    "missing": [name for name in modules if util.find_spec(name) is None],
}))
"""


@dataclass(frozen=True)
class EnginePython:
    """A Python interpreter whose environment holds an engine."""

    python: Path
    python_version: tuple[int, int, int]
    engine: str
    engine_version: str
    is_cpu: bool
    missing_modules: tuple[str, ...]

    @property
    def identity(self) -> str:
        """Changes with whatever an overlay made for this Python depends on."""
        text = f"{self.python}|{self.python_version}|{','.join(self.missing_modules)}"
        return digest_of([text.encode()])


def environment_without_infera() -> dict[str, str]:
    """Our environment without what would switch the hooks on or lend a child our own modules."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("INFERA_") and name not in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    }


def inspect_engine_python(python: Path, engine: str = "vllm") -> EnginePython:
    """Checks that a Python can import an engine and reads its version from the metadata, without importing torch.

    Raises ToolError when the interpreter does not run, is too old, or has no such engine.
    """
    # A virtual environment's python is a link to another; following it would lose the environment.
    path = Path(os.path.abspath(python.expanduser()))
    facts = _facts(path, engine)
    version = facts["python"]
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise ToolError(f"{path} is Python {version[0]}.{version[1]}; Infera's plugins need 3.11 or newer")
    if not facts["found"]:
        raise ToolError(
            f"{path} cannot import {engine}; give the python of an environment that has it, "
            f"or make one: infera engine-env install {engine}"
        )
    return EnginePython(
        python=path,
        python_version=(version[0], version[1], version[2]),
        engine=engine,
        engine_version=facts["version"] or "unknown",
        is_cpu=facts["is_cpu"],
        missing_modules=tuple(facts["missing"]),
    )


def _facts(path: Path, engine: str) -> dict[str, Any]:
    argv = [str(path), "-c", _INSPECTION, engine, *RUNTIME_MODULES]
    try:
        result = subprocess.run(
            argv, env=environment_without_infera(), capture_output=True, text=True, timeout=INSPECT_LIMIT_S, cwd="/"
        )
    except FileNotFoundError:
        raise ToolError(f"{path} does not exist; --engine-python wants the path of a python") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{path} could not be run: {error}") from error
    if result.returncode != 0:
        raise ToolError(f"{path} is no usable Python: {result.stderr.strip()[-500:] or f'status {result.returncode}'}")
    # A sitecustomize may print; our answer is the last line.
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer
