"""System libraries that packages from PyPI expect to find."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

from infera.tools.errors import ToolError
from infera.tools.progress import say

APT_LIMIT_S = 600.0


def has_shared_library(name: str) -> bool:
    """Whether the dynamic loader finds a library of this name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def require_shared_library(name: str, *, package: str, needed_by: str) -> None:
    """Makes sure that a library is there: root on a Debian installs its package, others are told how.

    Raises ToolError when it is missing and could not be installed.
    """
    if has_shared_library(name):
        return
    cure = f"install it, e.g. on Debian or Ubuntu: sudo apt-get install {package}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ToolError(f"{needed_by} needs {name}, which this machine lacks; {cure}")
    say(f"installing {package}, because {needed_by} needs {name}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", package]):
        try:
            subprocess.run(["apt-get", *arguments], env=environ, capture_output=True, timeout=APT_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"apt-get {arguments[0]} took longer than {APT_LIMIT_S:.0f} s; {cure}") from error
    if not has_shared_library(name):
        raise ToolError(f"{needed_by} needs {name} and apt-get could not install {package}; {cure}")
