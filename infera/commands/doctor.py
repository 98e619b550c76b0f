"""`infera doctor`: what is there, what is missing, and the cure. It changes nothing."""

from __future__ import annotations

import os
import platform
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from infera import __version__
from infera.commands.findings import CONNECT_LIMIT_S, Finding, ask_kvd, print_findings
from infera.tools.cachefolder import cache_folder
from infera.tools.engine_env import environment_folder, installed_vllm
from infera.tools.errors import ToolError
from kvd.options import Option, Program

PROGRAM = Program(
    name="infera doctor",
    summary="Lists what this host has of Infera, what does not answer, and how to cure it.",
    options=(
        Option("--server", "Base URL of the server.", default="http://127.0.0.1:8000", env="INFERA_DISCOVERY"),
        Option("--kvd-socket", "Unix socket of the cache daemon.", env="INFERA_KVD_SOCKET", metavar="PATH"),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Prints the findings; the status is 1 when one of them is bad."""
    if argv[:1] == ["vllm"]:
        from infera.commands.doctor_vllm import main as main_of_vllm

        return main_of_vllm(argv[1:])
    if argv[:1] == ["prompts"]:
        from infera.commands.doctor_prompts import main as main_of_prompts  # needs the server's libraries

        return main_of_prompts(argv)
    values = PROGRAM.parse(argv, os.environ)
    findings = [
        Finding("infera", None, f"{__version__}, Python {platform.python_version()}, {platform.machine()}"),
        core(),
        Finding("cache folder", None, str(cache_folder())),
        engine_environment(),
        overlays(),
        ask_kvd(values.kvd_socket),
        server(values.server.split(",")[0]),
    ]
    print_findings(findings)
    return 1 if any(finding.is_good is False for finding in findings) else 0


def core() -> Finding:
    """Whether the C core loads."""
    try:
        import infera_core.keys  # noqa: F401
    except ImportError as error:
        return Finding("C core", False, f"{error}; build it: make setup, or install infera again")
    return Finding("C core", True, str(Path(sys.modules["infera_core"].__file__ or "").parent))


def engine_environment() -> Finding:
    """Whether the CPU engine is installed. Not having it is fine where an engine of one's own is used."""
    try:
        found = installed_vllm()
    except ToolError as error:
        cure = f"remove {environment_folder()} and run: infera engine-env install vllm"
        return Finding("engine environment", False, f"{error}; {cure}")
    if found is None:
        return Finding("engine environment", None, "none; make one: infera engine-env install vllm")
    return Finding("engine environment", True, f"vLLM {found.engine_version} in {found.python.parents[1]}")


def overlays() -> Finding:
    """How many overlays are in the cache folder."""
    folder = cache_folder() / "overlays"
    count = sum(1 for _ in folder.glob("*/overlay.json")) if folder.is_dir() else 0
    return Finding("overlays", None, f"{count} in {folder}")


def server(url: str) -> Finding:
    """Whether the server is ready to take requests."""
    if not url.startswith(("http://", "https://")):
        return Finding("server", None, f"not asked: {url} is no HTTP address")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/ready", timeout=CONNECT_LIMIT_S):
            return Finding("server", True, f"{url} is ready")
    except urllib.error.HTTPError as error:
        return Finding("server", False, f"{url} answers {error.code}: no worker has joined yet; see {url}/v1/workers")
    except OSError as error:
        return Finding("server", None, f"{url} does not answer ({error}); start one: infera up MODEL")
