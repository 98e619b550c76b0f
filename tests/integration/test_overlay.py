"""Overlays built for a real interpreter that lacks what an engine's process needs."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from infera.tools.engine_python import EnginePython, environment_without_infera, inspect_engine_python
from infera.tools.overlay import ensure_overlay
from infera.tools.sources import checkout_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Everything the hook, the agent and the plugin's scheduler side import before an engine's own modules.
PROGRAM = """
import sys
import infera_core.keys, kvd.client, infera.hooks, infera.engine
import pluggy, zmq, msgspec
from importlib.metadata import entry_points
print([point.name for point in entry_points(group="infera.engine")])
print(infera_core.keys.__file__)
"""


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory: pytest.TempPathFactory) -> EnginePython:
    """An environment without pip and without any package but a stand-in for an engine."""
    folder = tmp_path_factory.mktemp("engine")
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    (site_packages / "vllm.py").write_text("raise RuntimeError('an engine must not be imported to be looked at')\n")
    return inspect_engine_python(folder / "bin" / "python")


@pytest.fixture(scope="module")
def overlay(engine_python: EnginePython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_overlay(engine_python, tmp_path_factory.mktemp("cache"))


def run_with(overlay: Path, engine_python: EnginePython, program: str) -> str:
    environ = {**environment_without_infera(), "PYTHONPATH": str(overlay)}
    argv = [str(engine_python.python), "-c", program]
    return subprocess.run(argv, env=environ, check=True, capture_output=True, text=True, cwd="/").stdout


def test_everything_an_engine_needs_is_in_it(overlay: Path, engine_python: EnginePython) -> None:
    assert set(engine_python.missing_modules) == {"pluggy", "_cffi_backend", "zmq", "msgspec"}
    points, core = run_with(overlay, engine_python, PROGRAM).splitlines()
    assert "vllm" in points
    assert core.startswith(str(overlay))


def test_its_sitecustomize_is_found_by_itself(overlay: Path, engine_python: EnginePython) -> None:
    program = "import sys; print(sys.modules['sitecustomize'].__file__)"
    assert run_with(overlay, engine_python, program).strip() == str(overlay / "sitecustomize.py")


def test_it_is_used_again_while_nothing_changed(overlay: Path, engine_python: EnginePython) -> None:
    before = (overlay / "overlay.json").stat().st_mtime_ns
    root = checkout_folder()
    assert root is not None
    again = ensure_overlay(engine_python, overlay.parents[1])
    if again == overlay:  # else somebody edited a source meanwhile
        assert (overlay / "overlay.json").stat().st_mtime_ns == before
    assert not list(overlay.parent.glob("build-*"))


def test_an_installed_infera_makes_one_without_a_checkout(
    overlay: Path, engine_python: EnginePython, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    newest = max(overlay.parents[1].glob("wheels/*/"), key=lambda folder: folder.stat().st_mtime)
    wheels = [str(wheel) for wheel in newest.glob("*.whl")]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *wheels]
    subprocess.run(install, check=True, capture_output=True)
    program = f"""
import sys
sys.path[:] = [{str(site)!r}] + [path for path in sys.path if path]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from pathlib import Path
from infera.tools.engine_python import inspect_engine_python
from infera.tools.overlay import ensure_overlay
from infera.tools.sources import checkout_folder
assert checkout_folder() is None
print(ensure_overlay(inspect_engine_python(Path({str(engine_python.python)!r})), Path({str(tmp_path / "cache")!r})))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    points, core = run_with(Path(result.stdout.strip()), engine_python, PROGRAM).splitlines()
    assert "vllm" in points
    assert core.startswith(str(tmp_path))
