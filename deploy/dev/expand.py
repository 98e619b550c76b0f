"""Prints what a developer's environment needs, one requirement a line, as pyproject.toml says it.

`make lock` feeds this to pip-compile: `python deploy/dev/expand.py > FILE.in`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path


def main() -> None:
    """Base dependencies, the build's own requirements, and the extras, without the reference to ourselves."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    requirements = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    requirements += [*extras["server"], *extras["dev"]]
    print("\n".join(sorted({line for line in requirements if not line.startswith("infera[")})))


if __name__ == "__main__":
    main()
