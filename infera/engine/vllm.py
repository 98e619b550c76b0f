"""`python -m infera.engine.vllm`: a vLLM worker, with flags instead of environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from infera.engine.launch import OPTIONS, Command, become, check_supported, engine_environment, explain
from kvd.options import OptionError, Program, Values

PROGRAM = Program(
    name="python -m infera.engine.vllm",
    summary="Run vLLM as a worker of the fleet. Flags not listed here go to vLLM as they are.",
    options=OPTIONS,
    rest="vLLM flags",
)


def build_command(values: Values, engine_flags: list[str], python: Path, overlay: Path) -> Command:
    """The vLLM server process for these options."""
    script = python.parent / "vllm"
    if script.exists():
        argv = [str(python), str(script), "serve", values.model]
    else:
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", values.model]
    argv += ["--host", values.host, "--port", str(values.port)]
    if values.served_model_name:
        argv += ["--served-model-name", values.served_model_name]
    return Command(argv + engine_flags, engine_environment(values, overlay, os.environ))


def find_engine(values: Values) -> tuple[Path, Path]:
    """The engine's Python and the overlay for it, made when missing.

    Raises:
        infera.tools.errors.ToolError: when there is no such engine.
    """
    from infera.tools.engine_env import ensure_vllm
    from infera.tools.engine_python import inspect_engine_python
    from infera.tools.overlay import ensure_overlay

    if values.engine_python and values.overlay:
        return Path(values.engine_python), Path(values.overlay)
    engine = inspect_engine_python(Path(values.engine_python)) if values.engine_python else ensure_vllm()
    overlay = Path(values.overlay) if values.overlay else ensure_overlay(engine)
    return engine.python, overlay


def main() -> int:
    """Entry point; does not return unless something is wrong or --dry-run is given."""
    from infera.tools.errors import ToolError

    values, engine_flags = PROGRAM.parse_known(sys.argv[1:], os.environ)
    try:
        check_supported(values)
        python, overlay = find_engine(values)
    except (OptionError, ToolError) as error:
        print(f"{PROGRAM.name}: {error}", file=sys.stderr)
        return 2
    command = build_command(values, engine_flags, python, overlay)
    if values.dry_run:
        print(explain(command, values))
        return 0
    become(command)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
