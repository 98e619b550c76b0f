"""Where our own code comes from: a checkout, or an installation. And a name for its present content."""

from __future__ import annotations

from pathlib import Path

from infera.tools.cachefolder import digest_of

SOURCE_FOLDERS = ("csrc", "kvd", "infera", "plugins")
SOURCE_SUFFIXES = frozenset({".py", ".c", ".h", ".toml"})
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "tests", ".mypy_cache", ".ruff_cache"})


def checkout_folder() -> Path | None:
    """The root of the checkout this code runs from; None when it runs from an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "csrc" / "build_ffi.py").is_file()
    return root if is_checkout else None


def source_files(root: Path) -> list[Path]:
    """The files that an overlay is made of, sorted, relative to `root`."""
    found = [root / name for name in ("pyproject.toml", "setup.py") if (root / name).is_file()]
    for name in SOURCE_FOLDERS:
        for path in (root / name).rglob("*"):
            is_skipped = any(part in SKIPPED_FOLDERS or part.endswith(".egg-info") for part in path.parts)
            # The C that cffi generates follows from the other files.
            if path.suffix in SOURCE_SUFFIXES and not is_skipped and path.name != "_native.c" and path.is_file():
                found.append(path)
    return sorted(path.relative_to(root) for path in found)


def source_digest(root: Path) -> str:
    """Changes with every edit of a source file."""
    parts: list[bytes] = []
    for path in source_files(root):
        parts += [str(path).encode(), (root / path).read_bytes()]
    return digest_of(parts)
